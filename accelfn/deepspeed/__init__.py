# SPDX-License-Identifier: Apache-2.0
"""The DeepSpeed ZeRO engine behind `wrap_deepspeed`."""
