# SPDX-License-Identifier: Apache-2.0
"""What others call things: words of PyTorch, Accelerate, Lightning, Transformers and Flax.

A table of attributes for each record, of arguments for each call, and of names of the package,
each with what is written here. A record under `@foreign` says it to who uses the word; a typing
slip is left to Python, which names the nearest.
"""

from accelfn.base.words.arguments import ARGUMENTS as ARGUMENTS
from accelfn.base.words.arguments import MADE_BY as MADE_BY
from accelfn.base.words.foreign import Word as Word
from accelfn.base.words.foreign import foreign as foreign
from accelfn.base.words.records import BATCH as BATCH
from accelfn.base.words.records import BATCH_IS_NO_VALUE as BATCH_IS_NO_VALUE
from accelfn.base.words.records import BATCHES as BATCHES
from accelfn.base.words.records import BATCHES_ARE_NO_LIST as BATCHES_ARE_NO_LIST
from accelfn.base.words.records import CHAIN as CHAIN
from accelfn.base.words.records import CHAIN_IS_NO_LIST as CHAIN_IS_NO_LIST
from accelfn.base.words.records import DATA as DATA
from accelfn.base.words.records import DATA_IS_NO_LOADER as DATA_IS_NO_LOADER
from accelfn.base.words.records import GRADS as GRADS
from accelfn.base.words.records import GRADS_ARE_NO_DICT as GRADS_ARE_NO_DICT
from accelfn.base.words.records import METRICS as METRICS
from accelfn.base.words.records import NAMES as NAMES
from accelfn.base.words.records import SCHEDULES as SCHEDULES
from accelfn.base.words.records import STATE as STATE
from accelfn.base.words.records import STATE_IS_NO_PAIR as STATE_IS_NO_PAIR
from accelfn.base.words.records import STATE_WRITES as STATE_WRITES
from accelfn.base.words.records import STORE as STORE
from accelfn.base.words.records import TRACKER as TRACKER
from accelfn.base.words.records import WORLD as WORLD
