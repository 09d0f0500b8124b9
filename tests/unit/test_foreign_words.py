# SPDX-License-Identifier: Apache-2.0
"""What other libraries call things is answered with what is written here."""

import copy
import functools
import inspect
import io
import pickle
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from accelerate import DistributedType, PartialState
from hypothesis import example, given
from hypothesis import strategies as st
from torch import nn

import accelfn as af
from accelfn.errors import (
    ArgumentError,
    CallError,
    CheckpointError,
    Error,
    RecordError,
    UnknownMetricError,
)
from tests.internals import arguments

X, Y = torch.ones(8, 3), torch.ones(8, 1)
WORLD = af.World.single(device="cpu")


def loss_fn(net, batch):
    inputs, targets = batch
    return (net(inputs) - targets).square().mean()


def create(**changes):
    given = {
        "model": lambda: nn.Linear(3, 1),
        "optimizer": partial(torch.optim.SGD, lr=0.1),
        "data": af.Data((X, Y), global_batch_size=4),
        "world": WORLD,
        **changes,
    }
    return af.TrainState.create(**given)


STATE = create()
BATCH = next(iter(af.batches(STATE)))
METRICS, GRADS = af.value_and_grad(loss_fn)(STATE, BATCH)
DATA = STATE.data
CHAIN = af.chain(af.ema(0.5))
TABLES = arguments.read_hints()
RECORDS = {
    type(record).__name__: record
    for record in (
        *(STATE, BATCH, DATA, GRADS, WORLD, CHAIN, METRICS, af.batches(STATE)),
        af.CheckpointStore(tempfile.mkdtemp()),
        af.track.in_memory(world=WORLD),
    )
}


def foreign_names(kind):
    """Return the hints of a kind of record, without those of operations."""
    return {n: hint for n, hint in TABLES[kind].items() if not n.startswith("__")}


@pytest.mark.parametrize("rank", range(4))
def test_where_a_rank_stands_is_said_rightly(rank):
    """What is written for Accelerate's words has their value, on two machines of two ranks."""
    theirs = PartialState.__new__(PartialState)  # with no process behind it
    theirs.__dict__ = {
        "process_index": rank,
        "local_process_index": rank % 2,
        "num_processes": 4,
        "distributed_type": DistributedType.MULTI_CPU,
    }
    world = SimpleNamespace(rank=rank, local_rank=rank % 2, size=4, is_main=rank == 0)
    for name in (
        *("is_main_process", "is_local_main_process", "is_last_process"),
        *("process_index", "local_process_index", "num_processes"),
    ):
        with pytest.raises(AttributeError) as caught:
            getattr(WORLD, name)
        written = re.search(r"read (world.*)\.$", str(caught.value))
        told = eval(written[1], {"world": world})  # noqa: S307 - our own words
        assert told == getattr(theirs, name)


@pytest.mark.parametrize("name", RECORDS)
def test_a_foreign_word_is_answered(name):
    """Section D: what others call it raises an AttributeError that says what to write."""
    record = RECORDS[name]
    fields = {each.name for each in getattr(type(record), "__attrs_attrs__", ())}
    assert fields & foreign_names(name).keys() == set()
    for word, advice in foreign_names(name).items():
        assert not hasattr(record, word)
        assert getattr(record, word, None) is None
        assert word not in {*dir(record), *dir(type(record))}
        with pytest.raises(RecordError, match=re.escape(advice)) as caught:
            getattr(record, word)
        assert isinstance(caught.value, AttributeError)
        assert word in str(caught.value)


@pytest.mark.slow
def test_hints_are_read_after_a_failure():
    """A program that uses no foreign name does not read the tables."""
    code = (
        "import accelfn as af; from accelfn.base.arguments import read_hints;"
        "world = af.World(); world.rank; world.is_main;"
        "assert read_hints.cache_info().currsize == 0;"
        "assert not hasattr(world, 'num_processes');"
        "assert read_hints.cache_info().currsize == 1"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_a_property_keeps_its_own_error():
    """An AttributeError inside a property is not replaced by one that names the property."""

    @arguments.hint_attributes()
    class Record:
        @property
        def broken(self):
            return self.no_such_name

    with pytest.raises(AttributeError, match="no attribute 'no_such_name'"):
        _ = Record().broken


def test_a_metric_is_an_item():
    """Section D: `metrics.loss` names `metrics["loss"]`; a name there is not says which are."""
    with pytest.raises(RecordError, match=r'write metrics\["loss"\]'):
        _ = METRICS.loss
    with pytest.raises(RecordError, match=r"the metrics are: loss"):
        _ = METRICS.accuracy
    with pytest.raises(KeyError, match="No metric 'los'; the metrics are") as caught:
        METRICS["los"]
    assert isinstance(caught.value, UnknownMetricError)
    assert str(caught.value).startswith("No metric")
    with pytest.raises(CallError, match=r'float\(metrics\["loss"\]\)'):
        float(METRICS)
    with pytest.raises(TypeError):
        METRICS + 3


@pytest.mark.parametrize("record", [STATE, BATCH, DATA, GRADS, WORLD])
def test_a_record_is_not_changed(record):
    """Setting or deleting an attribute says how to have another record."""
    for change in (
        lambda: setattr(record, "params", 1),
        lambda: delattr(record, "params"),
    ):
        with pytest.raises(
            RecordError, match="is immutable, so you cannot set its params"
        ):
            change()


def test_a_state_is_saved_by_accelfn():
    """Section D: pickle and torch.save of a state name af.save, before and after a step."""
    step = af.make_step(loss_fn)
    after, _ = step(create(), (X, Y))
    for state in (create(), after):
        for save in (pickle.dumps, lambda each: torch.save(each, io.BytesIO())):
            with pytest.raises(CallError, match=r"af\.save\(state, directory\)"):
                save(state)


CALLS: list[tuple[Callable[[], object], str]] = [
    (
        lambda: af.Data(X, 32),
        r"only dataset .* Write af\.Data\(dataset, global_batch_size=32\)",
    ),
    # as a DataLoader takes it
    (lambda: af.Data(X, 4, True), "global_batch_size=4, shuffle=True"),  # noqa: FBT003
    (
        lambda: af.Data(X, global_batch_size=4, collate_fn=list),
        "there is no argument collate_fn=; did you mean collate=?",
    ),
    (lambda: af.Data(X, global_batch_size=4, drop_last=True), 'write remainder="drop"'),
    (
        lambda: af.Data(X, batch_sise=4),
        "there is no argument batch_sise=; did you mean batch_sampler=?",
    ),
    (
        lambda: af.batches(STATE, qq=3),
        r"no argument qq=; af\.batches accepts state=, until_epoch=",
    ),
    (lambda: af.batches(STATE, num_epochs=3), "did you mean until_epoch=?"),
    (lambda: af.batches(STATE, 3), r"Write af\.batches\(state, until_epoch=3\)"),
    (
        METRICS.all_reduce_mean,
        r"all_reduce_mean\(.*missing .*'world'. Write .*all_reduce_mean\(world\)",
    ),
    (lambda: af.accumulate(4), r"Write af\.accumulate\(num_micro_batches=4\)"),
    (
        lambda: af.wrap_ddp(nn.Linear(1, 1)),
        r"wrap_ddp\(<Linear>\): a transform takes no model\. .*create\(model=\.\.\., setup=",
    ),
    (
        lambda: af.make_step(loss_fn, torch.optim.SGD([X], lr=0.1)),
        r"<SGD>\): a step gets the model and the optimizer from the state",
    ),
    (lambda: af.Data(X, Y, shuffle=True), r"af\.Data\(\(inputs, targets"),
    (
        lambda: af.load("run/c"),
        r"Write state = af\.load\(state, directory\), with a new state of TrainState",
    ),
    (lambda: af.shard_data(4), r"Pass these by name: name="),
    (lambda: af.local_sgd(8), r"Write af\.local_sgd\(sync_every=8\)"),
    (
        lambda: af.TrainState(model=nn.Linear, optimizer=None),
        r"af\.TrainState\.create\(model=\.\.\., optimizer=\.\.\.\)",
    ),
    (
        lambda: af.TrainState.create(nn.Linear, None),
        r"pass each by its name: af\.TrainState\.create\(model=\.\.\., optimizer=\.\.\.,",
    ),
    (
        lambda: af.TrainState.create(model=nn.Linear),
        r"required argument: 'optimizer'. Write af\.TrainState\.create\(model=\.\.\., opt",
    ),
    (
        lambda: af.TrainState.create(model=1, optimizer=1, scheduler=None),
        r"there is no argument scheduler=; write schedule=.*from_torch",
    ),
    (
        lambda: af.schedules.warmup_cosine(num_warmup_steps=1, num_training_steps=2),
        r"af\.schedules\.warmup_cosine\(.*did you mean num_warmup=?",
    ),
    (lambda: af.save(STATE), r"Write af\.save\(state, directory\)"),
    (
        lambda: RECORDS["CheckpointStore"].save(STATE, {"loss": 1.0}),
        "only state can be passed by position. Pass these by name: metrics=",
    ),
    # what is given by place: by its name, after others, nearly, and beside it
    (
        lambda: af.chain(transforms=[af.ema(0.9)]),
        r"unexpected keyword argument 'transforms'\. Write af\.chain\(\*transforms\)\.$",
    ),
    (
        lambda: af.evaluate(STATE, X, loss_fn, extras=3),
        r"keyword argument 'extras'\. Write af\.evaluate\(state, data, fn, \*extras",
    ),
    (
        lambda: af.chain(af.ema(0.9), transform=None),
        r"there is no argument transform=; af\.chain accepts \*transforms\.$",
    ),
    (
        lambda: af.evaluate(STATE, X, loss_fn, weights=3),
        r"no argument weights=; af\.evaluate accepts state=, data=, fn=, \*extras\.$",
    ),
    (lambda: af.ema(0.9, "x" * 28), r"af\.ema\(0\.9, 'x{28}'\): only"),
    (lambda: af.ema(0.9, "x" * 29), r"af\.ema\(0\.9, <str>\): only"),
    (lambda: af.batches(STATE, function=3), "there is no argument function="),
    # indexing, unpacking and iterating say where the values are
    (lambda: BATCH[0], "batch.value"),
    (lambda: BATCH["x"], "batch.value"),
    (lambda: [0 for _, _ in [BATCH]], "inputs, targets = batch.value"),
    (lambda: list(DATA), r"af\.batches\(state"),
    (lambda: DATA[0], r"data\.dataset\[i\]"),
    (lambda: [0 for _, _ in [STATE]], "state, metrics = step"),
    (lambda: GRADS["weight"], r"grads\.tensors"),
    (lambda: CHAIN[0], r"setup\.transforms"),
    (lambda: af.batches(STATE)[0], r"next\(iter\(af\.batches"),
    (lambda: nn.Linear(3, 1)(BATCH), "not a tensor: .* batch.value"),
    (lambda: torch.relu(BATCH), "not a tensor: .* batch.value"),
]


@pytest.mark.parametrize(("call", "said"), CALLS)
def test_a_wrong_call_is_answered(call, said):
    """Section D: what Python cannot bind or unpack says how to write it, as a TypeError."""
    with pytest.raises(CallError, match=said) as caught:
        call()
    assert isinstance(caught.value, TypeError)
    assert caught.value.__cause__ is None


SURROGATE = "\ud800"
REFUSED: list[tuple[str, Callable[[Any], object], list[Any], str]] = [
    (
        "DataError",
        lambda x: af.Data(x, global_batch_size=2),
        [DATA],
        "Pass data.dataset instead",
    ),
    # a loss or a measure that cannot be called so is refused before any update
    (
        "ArgumentError",
        af.make_step,
        [lambda: 1, lambda _: 1, lambda *, _model, _batch: 1],
        "calls it with a model and a batch, but its parameters are",
    ),
    *(
        (
            "LossError",
            use,
            [lambda: 1, lambda _: 1, lambda *, _model, _batch: 1],
            r"fn\(model, batch, \*extras\)",
        )
        for use in (
            lambda fn: af.evaluate(STATE, DATA, fn),
            lambda fn: next(af.predict(STATE, DATA, fn)),
        )
    ),
    (
        "LossError",
        lambda fn: af.evaluate(STATE, DATA, fn),
        [lambda _model, _batch, _teacher: 1.0],
        "missing a required argument: '_teacher'",
    ),
    (
        "LossError",
        lambda fn: af.make_step(fn)(STATE, BATCH),
        [lambda _model, _batch, _teacher, _weight: 1.0],
        "missing a required argument",
    ),
    (
        "ArgumentError",
        af.make_step,
        [nn.MSELoss(), nn.functional.mse_loss],
        "function of torch, which gets outputs",
    ),
    (
        "ArgumentError",
        af.Metrics,
        [3, None, [1, 2], {"a": ("x", "y")}, {"a": 3.0}],
        r"af\.Metrics",
    ),
    (
        "ArgumentError",
        af.transform,
        [int, str, list, type, Exception],
        "a class of your own, got",
    ),
    *(
        ("ArgumentError", call, [nn.Linear(3, 1), None, 3], rf"{name}\(state.*a TrainS")
        for name, call in (
            ("export_model", lambda state: af.export_model(state, "nowhere")),
            ("save_pretrained", lambda state: af.save_pretrained(state, "nowhere")),
            ("full_params", af.full_params),
        )
    ),
    (
        "ArgumentError",
        lambda name: create(name=name),
        [SURROGATE, "", 3, None],
        r"create\(name=.*expected a non-empty string",
    ),
    (
        "ArgumentError",
        lambda name: af.fork_rng(STATE, name),
        [SURROGATE, "", 3, None],
        r"af\.fork_rng\(purpose=.*expected a non-empty string",
    ),
    (
        "BatchError",
        lambda batch: af.all_gather_valid(X, batch, WORLD),
        [(X, Y)],
        r"expected a batch from af\.batches, got tuple",
    ),
    (
        "WorldError",
        lambda changes: af.World(**changes),
        [{"rank": "x"}, {"size": "x"}, {"size": 1.0}, {"rank": True}],
        "expected an integer",
    ),
    (
        "WorldError",
        lambda device: af.World(device=device),
        ["foo"],
        "torch does not know this device",
    ),
    (
        "ArgumentError",
        STATE.with_trainable,
        [lambda name: name],
        r"a function of \(name, parameter\)",
    ),
    (
        "StateError",
        STATE.with_params,
        [nn.Linear(3, 1), None, [1]],
        "expected a dict from names to tensors",
    ),
    (
        "ArgumentError",
        lambda world: af.join_uneven([1], world),
        [3],
        r"af\.join_uneven: expected an af\.World",
    ),
]


@pytest.mark.parametrize(("error", "call", "values", "said"), REFUSED)
def test_what_is_of_another_kind_is_refused(error, call, values, said):
    """Section C: it is refused by name, and not taken for something else."""
    for value in values:
        with pytest.raises(getattr(af.errors, error), match=said):
            call(value)


def test_records_are_copied_and_pickled():
    """A state's copy has tensors of its own; what is plain data can be sent."""
    step = af.make_step(loss_fn)
    state, _ = step(create(), (X, Y))
    assert copy.copy(state) is state
    other = copy.deepcopy({"state": state})["state"]
    assert other.definition is state.definition
    state, _ = step(state, (X, Y))
    other, _ = step(other, (X, Y))
    assert torch.equal(state.params["weight"], other.params["weight"])
    for record in (METRICS, BATCH, DATA):
        sent = pickle.loads(pickle.dumps(record))  # noqa: S301 - its own
        assert type(sent) is type(copy.deepcopy(record)) is type(record)


DOORS = """
CheckpointStore Data TrainState TrainState.create World World.from_env apply_grads batches
borrow_model chain epochs evaluate export_model snapshot_model full_params
all_gather import_model launch load load_part make_step Metrics.all_reduce_mean predict profile
all_reduce run save schedules.linear
schedules.warmup_cosine transform value_and_grad
""".split()  # noqa: SIM905 - one a line is long
"""The calls that a newcomer writes first; transforms have one wrapper for all."""
TRANSFORMS = [
    name
    for name in dir(af)
    if getattr(getattr(af, name), "__module__", "").startswith("accelfn.transforms.")
    and inspect.isclass(getattr(af, name))
]


@pytest.mark.parametrize("name", [*DOORS, *TRANSFORMS])
def test_no_front_door_answers_with_a_bare_type_error(name):
    """A first call with an argument that it has not says so in the user's words."""
    what = functools.reduce(getattr, name.split("."), af)
    with pytest.raises(
        CallError, match=re.escape(f"af.{name}(no_such_=1): there is no")
    ):
        what(no_such_=1)


@given(st.integers(), st.text(max_size=3), st.booleans())
@example(0, "", False)  # noqa: FBT003 - an example
def test_a_call_that_can_be_bound_is_the_function_s_own(first, second, given_by_name):
    """`explain_call_errors` changes nothing of what a function returns or raises."""
    from tests.internals import explain_call_errors

    def function(first, *, second="x"):
        if not second:
            msg = "a TypeError of its own"
            raise TypeError(msg)
        return first, second

    told = explain_call_errors(function)
    assert inspect.signature(told) == inspect.signature(function)
    named = {"second": second} if given_by_name else {}
    try:
        expected = function(first, **named)
    except TypeError as error:
        with pytest.raises(TypeError, match=str(error)) as caught:
            told(first, **named)
        assert not isinstance(caught.value, Error)
    else:
        assert expected == told(first, **named)


@pytest.mark.parametrize("module", [af, af.schedules])
def test_a_name_of_another_library_is_answered(module):
    """`af.Accelerator` says what there is instead; so do others, schedules too."""
    for word, advice in TABLES[module.__name__].items():
        with pytest.raises(RecordError, match=re.escape(advice)):
            getattr(module, word)
    assert not hasattr(module, "no_such_")


def test_tables_name_what_there_is():
    """What a table says to write for an argument is an argument of that call."""
    calls = {name: table for name, table in TABLES.items() if name.startswith("af.")}
    for name, table in calls.items():
        what = af
        for part in name.split(".")[1:]:
            what = getattr(what, part)
        known = inspect.signature(what).parameters
        for word, advice in table.items():
            assert word not in known, (name, word)
            if re.fullmatch(r"\w+=", advice):
                assert advice[:-1] in known, (name, word)


NO_PATHS = [None, 3, {}, nn.Linear, "a\ud800b", "a\0b", b"bytes"]
TAKE_A_PATH = {
    "export_model": lambda path: af.export_model(STATE, path),
    "save_pretrained": lambda path: af.save_pretrained(STATE, path),
    "import_model": lambda path: af.import_model(nn.Linear(3, 1), path),
    "import_torch_weights": lambda path: af.import_torch_weights(nn.Linear(3, 1), path),
    "profile": lambda path: af.profile(path, af.World.single()).__enter__(),
}


@pytest.mark.parametrize("name", TAKE_A_PATH)
@pytest.mark.parametrize("value", NO_PATHS, ids=repr)
def test_what_is_no_path_is_refused(name, value):
    """Section C: neither None nor half of a surrogate pair is taken for a path."""
    with pytest.raises(ArgumentError, match=rf"af\.{name}\(.*expected the path of"):
        TAKE_A_PATH[name](value)


def test_a_tensor_s_name_is_text(tmp_path):
    """Section C: other readers of safetensors refuse half of a surrogate pair."""

    def odd():
        net = nn.Module()
        net.register_parameter("a\ud800", nn.Parameter(torch.ones(1)))
        return net

    with pytest.raises(CheckpointError, match="cannot be written to a file"):
        af.export_model(create(model=odd, data=None), tmp_path / "odd")
