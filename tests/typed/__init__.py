# SPDX-License-Identifier: Apache-2.0
"""What type checkers see of the public names: a program passes, and each typo is an error."""
