# SPDX-License-Identifier: Apache-2.0
"""Start the ranks of a run: by `accelfn launch`, with a settings file, or by `af.launch`."""
