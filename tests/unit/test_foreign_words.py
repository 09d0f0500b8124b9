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
from functools import partial
from types import SimpleNamespace

import pytest
import torch
from accelerate import DistributedType, PartialState
from hypothesis import example, given
from hypothesis import strategies as st
from torch import nn

import accelfn as af
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
    for word, advice in foreign_names(name).items():
        assert not hasattr(record, word)
        assert getattr(record, word, None) is None
        assert word not in {*dir(record), *dir(type(record))}
        with pytest.raises(af.errors.RecordError, match=re.escape(advice)) as caught:
            getattr(record, word)
        assert isinstance(caught.value, AttributeError)
        assert word in str(caught.value)


@pytest.mark.parametrize("name", RECORDS)
def test_no_foreign_word_hides_a_name_of_the_record(name):
    """A word of the table is none that the record has."""
    kind = type(RECORDS[name])
    fields = {each.name for each in getattr(kind, "__attrs_attrs__", ())}
    assert {*fields, *dir(kind)} & foreign_names(name).keys() == set()


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
    with pytest.raises(af.errors.RecordError, match=r'write metrics\["loss"\]'):
        _ = METRICS.loss
    with pytest.raises(af.errors.RecordError, match=r"the metrics are: loss"):
        _ = METRICS.accuracy
    with pytest.raises(KeyError, match="No metric 'los'; the metrics are") as caught:
        METRICS["los"]
    assert isinstance(caught.value, af.errors.UnknownMetricError)
    assert str(caught.value).startswith("No metric")
    with pytest.raises(af.errors.CallError, match=r'float\(metrics\["loss"\]\)'):
        float(METRICS)
    with pytest.raises(TypeError):
        METRICS + 3


@pytest.mark.parametrize("value", [3, None, [1, 2], {"a": ("x", "y")}, {"a": 3.0}])
def test_metrics_are_made_of_sums(value):
    """Section C: junk in place of weighted sums is refused by name."""
    with pytest.raises(af.errors.ArgumentError, match=r"af\.Metrics"):
        af.Metrics(value)


UNPACKED = {
    "batch[0]": (lambda: BATCH[0], "batch.value"),
    'batch["x"]': (lambda: BATCH["x"], "batch.value"),
    "x, y = batch": (lambda: [0 for _, _ in [BATCH]], "inputs, targets = batch.value"),
    "for b in data": (lambda: list(DATA), r"af\.batches\(state"),
    "data[0]": (lambda: DATA[0], r"data\.dataset\[i\]"),
    "state, metrics = state": (
        lambda: [0 for _, _ in [STATE]],
        "state, metrics = step",
    ),
    "grads[name]": (lambda: GRADS["weight"], r"grads\.tensors"),
    "setup[0]": (lambda: CHAIN[0], r"setup\.transforms"),
    "batches[0]": (lambda: af.batches(STATE)[0], r"next\(iter\(af\.batches"),
    "model(batch)": (lambda: nn.Linear(3, 1)(BATCH), "not a tensor: .* batch.value"),
    "relu(batch)": (lambda: torch.relu(BATCH), "not a tensor: .* batch.value"),
}


@pytest.mark.parametrize("case", UNPACKED)
def test_a_record_is_no_container(case):
    """Section D: indexing, unpacking and iterating say where the values are."""
    call, said = UNPACKED[case]
    with pytest.raises(af.errors.CallError, match=said) as caught:
        call()
    assert isinstance(caught.value, TypeError)


def test_a_data_of_data():
    """What cannot be iterated over is no dataset either."""
    with pytest.raises(af.errors.DataError, match="Pass data.dataset instead"):
        af.Data(DATA, global_batch_size=2)


@pytest.mark.parametrize("fn", [lambda: 1, lambda _: 1, lambda *, _model, _batch: 1])
def test_a_function_takes_a_model_and_a_batch(fn):
    """A loss or a measure that cannot be called so is refused before any update."""
    with pytest.raises(
        af.errors.ArgumentError,
        match="calls it with a model and a batch, but its parameters are",
    ):
        af.make_step(fn)
    for use in (af.evaluate, lambda *given: next(af.predict(*given))):
        with pytest.raises(af.errors.LossError, match=r"fn\(model, batch, \*extras\)"):
            use(STATE, DATA, fn)
    with pytest.raises(
        af.errors.LossError, match="missing a required argument: '_teacher'"
    ):
        af.evaluate(STATE, DATA, lambda _model, _batch, _teacher: 1.0)
    step = af.make_step(lambda _model, _batch, _teacher, _weight: 1.0)
    with pytest.raises(af.errors.LossError, match="missing a required argument"):
        step(STATE, BATCH)
    for of_torch in (nn.MSELoss(), nn.functional.mse_loss):
        with pytest.raises(
            af.errors.ArgumentError, match="function of torch, which gets outputs"
        ):
            af.make_step(of_torch)


@pytest.mark.parametrize("record", [STATE, BATCH, DATA, GRADS, WORLD])
def test_a_record_is_not_changed(record):
    """Setting or deleting an attribute says how to have another record."""
    for change in (
        lambda: setattr(record, "params", 1),
        lambda: delattr(record, "params"),
    ):
        with pytest.raises(
            af.errors.RecordError, match="is immutable, so you cannot set its params"
        ):
            change()


def test_a_state_is_saved_by_accelfn():
    """Section D: pickle and torch.save of a state name af.save, before and after a step."""
    step = af.make_step(loss_fn)
    after, _ = step(create(), (X, Y))
    for state in (create(), after):
        for save in (pickle.dumps, lambda each: torch.save(each, io.BytesIO())):
            with pytest.raises(
                af.errors.CallError, match=r"af\.save\(state, directory\)"
            ):
                save(state)


def test_a_copied_state_has_tensors_of_its_own():
    """copy.deepcopy of a state is its `copy`; copy.copy is the value itself."""
    step = af.make_step(loss_fn)
    state, _ = step(create(), (X, Y))
    assert copy.copy(state) is state
    other = copy.deepcopy({"state": state})["state"]
    assert other.definition is state.definition
    state, _ = step(state, (X, Y))
    other, _ = step(other, (X, Y))
    assert torch.equal(state.params["weight"], other.params["weight"])


@pytest.mark.parametrize("record", [METRICS, BATCH, DATA])
def test_other_records_are_copied_and_pickled(record):
    """What is plain data can be sent, words or no words."""
    for made in (
        pickle.loads(pickle.dumps(record)),  # noqa: S301 - its own
        copy.deepcopy(record),
    ):
        assert type(made) is type(record)


CALLS = {
    "af.Data(X, 32)": (
        lambda: af.Data(X, 32),
        r"only dataset .* Write af\.Data\(dataset, global_batch_size=32\)",
    ),
    "af.Data(X, 4, True)": (
        lambda: af.Data(X, 4, True),  # noqa: FBT003 - as a DataLoader takes it
        "global_batch_size=4, shuffle=True",
    ),
    "collate_fn": (
        lambda: af.Data(X, global_batch_size=4, collate_fn=list),
        "there is no argument collate_fn=; did you mean collate=?",
    ),
    "drop_last": (
        lambda: af.Data(X, global_batch_size=4, drop_last=True),
        'write remainder="drop"',
    ),
    "a slip": (
        lambda: af.Data(X, batch_sise=4),
        "there is no argument batch_sise=; did you mean batch_sampler=?",
    ),
    "no likeness": (
        lambda: af.batches(STATE, qq=3),
        r"no argument qq=; af\.batches accepts state=, until_epoch=",
    ),
    "num_epochs": (
        lambda: af.batches(STATE, num_epochs=3),
        "did you mean until_epoch=?",
    ),
    "batches by position": (
        lambda: af.batches(STATE, 3),
        r"Write af\.batches\(state, until_epoch=3\)",
    ),
    "all_reduce_mean()": (
        METRICS.all_reduce_mean,
        r"all_reduce_mean\(.*missing .*'world'. Write .*all_reduce_mean\(world\)",
    ),
    "accumulate": (
        lambda: af.accumulate(4),
        r"Write af\.accumulate\(num_micro_batches=4\)",
    ),
    "a model to a transform": (
        lambda: af.wrap_ddp(nn.Linear(1, 1)),
        r"af\.wrap_ddp\(<Linear>\): a transform takes no model\. .*create\(model=\.\.\., setup=",
    ),
    "an optimizer to make_step": (
        lambda: af.make_step(loss_fn, torch.optim.SGD([X], lr=0.1)),
        r"<SGD>\): a step gets the model and the optimizer from the state",
    ),
    "two tensors": (
        lambda: af.Data(X, Y, shuffle=True),
        r"af\.Data\(\(inputs, targets",
    ),
    "a directory alone": (
        lambda: af.load("run/c"),
        r"Write state = af\.load\(state, directory\), with a new state of TrainState",
    ),
    "nothing to say": (lambda: af.shard_data(4), r"Pass these by name: name="),
    "local_sgd": (lambda: af.local_sgd(8), r"Write af\.local_sgd\(sync_every=8\)"),
    "TrainState(...)": (
        lambda: af.TrainState(model=nn.Linear, optimizer=None),
        r"af\.TrainState\.create\(model=\.\.\., optimizer=\.\.\.\)",
    ),
    "create by position": (
        lambda: af.TrainState.create(nn.Linear, None),
        r"pass each by its name: af\.TrainState\.create\(model=\.\.\., optimizer=\.\.\.,",
    ),
    "create without": (
        lambda: af.TrainState.create(model=nn.Linear),
        r"required argument: 'optimizer'. Write af\.TrainState\.create\(model=\.\.\., opt",
    ),
    "scheduler": (
        lambda: af.TrainState.create(model=1, optimizer=1, scheduler=None),
        r"there is no argument scheduler=; write schedule=.*from_torch",
    ),
    "warmup": (
        lambda: af.schedules.warmup_cosine(num_warmup_steps=1, num_training_steps=2),
        r"af\.schedules\.warmup_cosine\(.*did you mean num_warmup=?",
    ),
    "all of it": (lambda: af.save(STATE), r"Write af\.save\(state, directory\)"),
    "a store's": (
        lambda: RECORDS["CheckpointStore"].save(STATE, {"loss": 1.0}),
        "only state can be passed by position. Pass these by name: metrics=",
    ),
    "what is given by place, by its name": (
        lambda: af.chain(transforms=[af.ema(0.9)]),
        r"unexpected keyword argument 'transforms'\. Write af\.chain\(\*transforms\)\.$",
    ),
    "what is given by place, after others": (
        lambda: af.evaluate(STATE, X, loss_fn, extras=3),
        r"unexpected keyword argument 'extras'\. Write af\.evaluate\(state, data, fn, \*extras",
    ),
    "nearly what is given by place": (
        lambda: af.chain(af.ema(0.9), transform=None),
        r"there is no argument transform=; af\.chain accepts \*transforms\.$",
    ),
    "beside what is given by place": (
        lambda: af.evaluate(STATE, X, loss_fn, weights=3),
        r"there is no argument weights=; af\.evaluate accepts state=, data=, fn=, \*extras\.$",
    ),
    "short text": (lambda: af.ema(0.9, "x" * 28), r"af\.ema\(0\.9, 'x{28}'\): only"),
    "long text": (lambda: af.ema(0.9, "x" * 29), r"af\.ema\(0\.9, <str>\): only"),
    "a keyword called function": (
        lambda: af.batches(STATE, function=3),
        "there is no argument function=",
    ),
}


@pytest.mark.parametrize("case", CALLS)
def test_a_wrong_call_is_answered(case):
    """Section D: a call that Python cannot bind says how to write it, as a TypeError."""
    call, said = CALLS[case]
    with pytest.raises(af.errors.CallError, match=said) as caught:
        call()
    assert isinstance(caught.value, TypeError)
    assert caught.value.__cause__ is None


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
        af.errors.CallError, match=re.escape(f"af.{name}(no_such_=1): there is no")
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
        assert not isinstance(caught.value, af.errors.Error)
    else:
        assert expected == told(first, **named)


@pytest.mark.parametrize("module", [af, af.schedules])
def test_a_name_of_another_library_is_answered(module):
    """`af.Accelerator` says what there is instead; so do others, schedules too."""
    for word, advice in TABLES[module.__name__].items():
        with pytest.raises(af.errors.RecordError, match=re.escape(advice)):
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


@pytest.mark.parametrize("kind", [int, str, list, type, Exception])
def test_a_class_of_python_s_own_is_no_transform(kind):
    """Section C: `@af.transform` on int is refused by name."""
    with pytest.raises(af.errors.ArgumentError, match="a class of your own, got"):
        af.transform(kind)


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
    with pytest.raises(
        af.errors.ArgumentError, match=rf"af\.{name}\(.*expected the path of"
    ):
        TAKE_A_PATH[name](value)


@pytest.mark.parametrize("name", ["export_model", "save_pretrained", "full_params"])
def test_what_writes_a_model_takes_a_state(name):
    """Section C: a module in the place of a state is refused by name."""
    given = () if name == "full_params" else ("nowhere",)
    for value in (nn.Linear(3, 1), None, 3):
        with pytest.raises(
            af.errors.ArgumentError, match=rf"af\.{name}\(state.*a TrainState"
        ):
            getattr(af, name)(value, *given)


def test_names_are_text():
    """Section C: a name with half of a surrogate pair, or none at all, is refused."""
    for name in ("\ud800", "", 3, None):
        with pytest.raises(
            af.errors.ArgumentError, match=r"create\(name=.*expected a non-empty string"
        ):
            create(name=name)
        with pytest.raises(
            af.errors.ArgumentError,
            match=r"af\.fork_rng\(purpose=.*expected a non-empty string",
        ):
            af.fork_rng(STATE, name)


def test_a_tensor_s_name_is_text(tmp_path):
    """Section C: other readers of safetensors refuse half of a surrogate pair."""

    def odd():
        net = nn.Module()
        net.register_parameter("a\ud800", nn.Parameter(torch.ones(1)))
        return net

    with pytest.raises(af.errors.CheckpointError, match="cannot be written to a file"):
        af.export_model(create(model=odd, data=None), tmp_path / "odd")


def test_a_batch_is_one_of_batches():
    """What has no filler cannot be told from it."""
    with pytest.raises(
        af.errors.BatchError, match=r"expected a batch from af\.batches, got tuple"
    ):
        af.all_gather_valid(X, (X, Y), WORLD)


def test_a_world_is_of_integers():
    for changes in ({"rank": "x"}, {"size": "x"}, {"size": 1.0}, {"rank": True}):
        with pytest.raises(af.errors.WorldError, match="expected an integer"):
            af.World(**changes)
    with pytest.raises(af.errors.WorldError, match="torch does not know this device"):
        af.World(device="foo")


def test_other_things_of_another_kind():
    """Functions of one argument, modules for parameters, numbers for worlds."""
    with pytest.raises(
        af.errors.ArgumentError, match=r"a function of \(name, parameter\)"
    ):
        STATE.with_trainable(lambda name: name)
    for value in (nn.Linear(3, 1), None, [1]):
        with pytest.raises(
            af.errors.StateError, match="expected a dict from names to tensors"
        ):
            STATE.with_params(value)
    with pytest.raises(
        af.errors.ArgumentError, match=r"af\.join_uneven: expected an af\.World"
    ):
        af.join_uneven([1], 3)
