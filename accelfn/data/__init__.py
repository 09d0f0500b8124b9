# SPDX-License-Identifier: Apache-2.0
"""Data as a function of an index: orders, plans, reading."""

from accelfn.data.batch import Batch as Batch
from accelfn.data.budget import budget as budget
from accelfn.data.dataset import Data as Data
from accelfn.data.plan import Plan as Plan
