# SPDX-License-Identifier: Apache-2.0
"""`wrap_deepspeed`: train with DeepSpeed's ZeRO."""
