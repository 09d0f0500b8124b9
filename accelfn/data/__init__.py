# SPDX-License-Identifier: Apache-2.0
"""Datasets, the order of their samples, and the share of each batch for each rank."""

from accelfn.data.dataset import Data as Data
from accelfn.data.plan import Batch as Batch
from accelfn.data.plan import Plan as Plan
from accelfn.data.plan import token_budget as token_budget
