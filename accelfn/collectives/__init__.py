# SPDX-License-Identifier: Apache-2.0
"""Collectives: the few calls in which ranks talk, each with a label and a named failure."""

from accelfn.collectives.naming import naming as naming
from accelfn.collectives.objects import broadcast_object as broadcast_object
from accelfn.collectives.objects import gather_objects as gather_objects
from accelfn.collectives.objects import scatter as scatter
from accelfn.collectives.packed import all_gather as all_gather
from accelfn.collectives.packed import all_gather_rows as all_gather_rows
from accelfn.collectives.packed import all_reduce_ as all_reduce_
from accelfn.collectives.packed import are_told_alike as are_told_alike
from accelfn.collectives.packed import barrier as barrier
from accelfn.collectives.packed import broadcast_ as broadcast_
from accelfn.collectives.packed import gather_bytes as gather_bytes
from accelfn.collectives.packed import gather_text as gather_text
from accelfn.collectives.packed import pack as pack
from accelfn.collectives.packed import scatter_bytes as scatter_bytes
from accelfn.collectives.packed import sum_ as sum_
from accelfn.collectives.packed import sum_named as sum_named
from accelfn.collectives.packed import unpack_ as unpack_
from accelfn.collectives.parts import by_calls as by_calls
from accelfn.collectives.parts import wholes as wholes
from accelfn.collectives.replicas import check_replicas as check_replicas
from accelfn.collectives.replicas import check_rows as check_rows
from accelfn.collectives.replicas import check_sums as check_sums
from accelfn.collectives.replicas import check_values as check_values
from accelfn.collectives.replicas import checksum as checksum
from accelfn.collectives.replicas import first_difference as first_difference
from accelfn.collectives.swapped import all_to_all as all_to_all
from accelfn.collectives.trees import all_ranks as all_ranks
from accelfn.collectives.trees import any_rank as any_rank
from accelfn.collectives.trees import broadcast as broadcast
from accelfn.collectives.trees import gather as gather
from accelfn.collectives.trees import gather_ragged as gather_ragged
from accelfn.collectives.trees import join_rows as join_rows
from accelfn.collectives.trees import pad_across as pad_across
from accelfn.collectives.trees import reduce as reduce
