# SPDX-License-Identifier: Apache-2.0
"""What is trained, and how: the part of a training that no update changes."""
