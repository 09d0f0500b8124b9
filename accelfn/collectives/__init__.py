# SPDX-License-Identifier: Apache-2.0
"""Labeled collectives with clear errors if ranks disagree; optional packages import from here."""

from accelfn.collectives.failures import break_off as break_off
from accelfn.collectives.failures import format_tensor as format_tensor
from accelfn.collectives.failures import naming as naming
from accelfn.collectives.failures import site as site
from accelfn.collectives.failures import start as start
from accelfn.collectives.failures import table as table
from accelfn.collectives.packed import all_gather_list as all_gather_list
from accelfn.collectives.packed import all_reduce_ as all_reduce_
from accelfn.collectives.packed import broadcast_ as broadcast_
from accelfn.collectives.packed import carries as carries
from accelfn.collectives.packed import gather_text as gather_text
from accelfn.collectives.packed import reduce_scatter_ as reduce_scatter_
from accelfn.collectives.packed import reduce_to_holders_ as reduce_to_holders_
from accelfn.collectives.packed import start_sum_ as start_sum_
from accelfn.collectives.packed import sum_ as sum_
from accelfn.collectives.replicas import by_calls as by_calls
from accelfn.collectives.replicas import gather_full as gather_full
from accelfn.collectives.trees import join_rows as join_rows
