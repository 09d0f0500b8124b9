# SPDX-License-Identifier: Apache-2.0
"""The laws of training, held against transforms and steps of users."""
