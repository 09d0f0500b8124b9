# SPDX-License-Identifier: Apache-2.0
"""Every scheduler that torch and Transformers ship, its options drawn for some groups.

A row draws a factory that takes an optimizer with `groups` parameter groups; `cycles` says
whether that has a momentum, or betas, to be cycled.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from hypothesis import strategies as st
from torch.optim import lr_scheduler, swa_utils
from transformers import get_scheduler, optimization

Factory = Callable[[torch.optim.Optimizer], lr_scheduler.LRScheduler]
Row = Callable[[int, bool], st.SearchStrategy[Factory]]

NUMBERS = st.sampled_from([0.0, 0.01, 0.3, 0.5, 1.0])
COUNTS = st.integers(1, 6)
RATES = st.sampled_from([1e-3, 0.03, 0.1])
LOW = st.sampled_from([0.0, 1e-4, 0.02])


def options(
    cls: Callable[..., Any],
    needed: dict[str, Any] | None = None,
    **optional: st.SearchStrategy[Any],
) -> st.SearchStrategy[Factory]:
    drawn = st.fixed_dictionaries(needed or {}, optional=optional)
    return drawn.map(lambda found: partial(cls, **found))


def each(of: st.SearchStrategy[Any], groups: int) -> st.SearchStrategy[Any]:
    """Draw one for all groups, or one for each."""
    return of | st.lists(of, min_size=groups, max_size=groups)


def decays(scale: float) -> Callable[[int], float]:
    return lambda step: scale ** (step % 7)


def one_cycle(groups: int, cycles: bool) -> st.SearchStrategy[Factory]:
    return options(
        lr_scheduler.OneCycleLR,
        {
            "max_lr": each(RATES, groups),
            "total_steps": st.integers(12, 20),
            "cycle_momentum": st.just(value=True) if cycles else st.just(value=False),
        },
        pct_start=st.sampled_from([0.2, 0.5]),
        anneal_strategy=st.sampled_from(["cos", "linear"]),
        base_momentum=each(st.sampled_from([0.5, 0.8]), groups),
        max_momentum=each(st.sampled_from([0.85, 0.9]), groups),
        div_factor=st.sampled_from([25.0, 4.0]),
        final_div_factor=st.sampled_from([1e4, 10.0]),
        three_phase=st.booleans(),
    )


def cyclic(groups: int, cycles: bool) -> st.SearchStrategy[Factory]:
    return options(
        lr_scheduler.CyclicLR,
        {
            "base_lr": each(LOW, groups),
            "max_lr": each(RATES, groups),
            "step_size_up": COUNTS,
            "cycle_momentum": st.just(value=True) if cycles else st.just(value=False),
        },
        step_size_down=COUNTS,
        mode=st.sampled_from(["triangular", "triangular2", "exp_range"]),
        gamma=st.sampled_from([1.0, 0.9]),
        scale_fn=st.just(lambda x: 1 / (1 + x)),
        base_momentum=each(st.sampled_from([0.5, 0.8]), groups),
    )


def sequential(groups: int, cycles: bool) -> st.SearchStrategy[Factory]:
    parts = st.lists(plain(groups, cycles), min_size=2, max_size=3)

    def made(found: list[Factory], at: list[int]) -> Factory:
        def factory(optimizer: torch.optim.Optimizer) -> lr_scheduler.SequentialLR:
            inner = [part(optimizer) for part in found]
            milestones = sorted(at)[: len(inner) - 1]
            return lr_scheduler.SequentialLR(optimizer, inner, milestones)

        return factory

    ends = st.lists(st.integers(1, 9), min_size=2, max_size=2, unique=True)
    return st.builds(made, parts, ends)


def chained(groups: int, cycles: bool) -> st.SearchStrategy[Factory]:
    def made(found: list[Factory]) -> Factory:
        return lambda optimizer: lr_scheduler.ChainedScheduler(
            [part(optimizer) for part in found]
        )

    return st.lists(plain(groups, cycles), min_size=1, max_size=3).map(made)


def plain(groups: int, cycles: bool) -> st.SearchStrategy[Factory]:
    names = ["ConstantLR", "LinearLR", "ExponentialLR", "StepLR", "CosineAnnealingLR"]
    return st.sampled_from(names).flatmap(lambda name: TORCH[name](groups, cycles))


TORCH: dict[str, Row] = {
    "LambdaLR": lambda groups, _: options(
        lr_scheduler.LambdaLR, {"lr_lambda": each(NUMBERS.map(decays), groups)}
    ),
    "MultiplicativeLR": lambda groups, _: options(
        lr_scheduler.MultiplicativeLR,
        {"lr_lambda": each(st.sampled_from([0.5, 0.9, 1.0]).map(decays), groups)},
    ),
    "StepLR": lambda _groups, _: options(
        lr_scheduler.StepLR, {"step_size": COUNTS}, gamma=NUMBERS
    ),
    "MultiStepLR": lambda _groups, _: options(
        lr_scheduler.MultiStepLR, {"milestones": st.lists(COUNTS, max_size=3)}
    ),
    "ConstantLR": lambda _groups, _: options(
        lr_scheduler.ConstantLR, factor=st.sampled_from([0.3, 1.0]), total_iters=COUNTS
    ),
    "LinearLR": lambda _groups, _: options(
        lr_scheduler.LinearLR,
        start_factor=st.sampled_from([1e-3, 0.3, 1.0]),
        end_factor=NUMBERS,
        total_iters=COUNTS,
    ),
    "ExponentialLR": lambda _groups, _: options(
        lr_scheduler.ExponentialLR, {"gamma": st.sampled_from([0.5, 0.9, 1.0])}
    ),
    "PolynomialLR": lambda _groups, _: options(
        lr_scheduler.PolynomialLR, total_iters=COUNTS, power=st.sampled_from([1, 2.0])
    ),
    "CosineAnnealingLR": lambda _groups, _: options(
        lr_scheduler.CosineAnnealingLR, {"T_max": st.integers(2, 9)}, eta_min=LOW
    ),
    "CosineAnnealingWarmRestarts": lambda _groups, _: options(
        lr_scheduler.CosineAnnealingWarmRestarts,
        {"T_0": COUNTS},
        T_mult=st.integers(1, 2),
        eta_min=LOW,
    ),
    "CyclicLR": cyclic,
    "OneCycleLR": one_cycle,
    "SequentialLR": sequential,
    "ChainedScheduler": chained,
    "SWALR": lambda groups, _: options(
        swa_utils.SWALR,
        {"swa_lr": each(RATES, groups)},
        anneal_epochs=st.integers(0, 5),
        anneal_strategy=st.sampled_from(["cos", "linear"]),
    ),
}

WITH_METRIC = {"ReduceLROnPlateau"}
"""What is refused; LRScheduler itself is no scheduler."""

SPECIFIC: dict[str, dict[str, st.SearchStrategy[Any]]] = {
    "cosine_with_restarts": {"num_cycles": st.integers(1, 3)},
    "cosine": {"num_cycles": st.sampled_from([0.5, 1.5])},
    "polynomial": {
        "lr_end": st.sampled_from([1e-7, 1e-4]),
        "power": st.sampled_from([0.5, 2.0]),
    },
    "inverse_sqrt": {"timescale": st.integers(1, 9)},
    "cosine_with_min_lr": {"min_lr_rate": st.sampled_from([0.1, 0.5])},
    "cosine_warmup_with_min_lr": {
        "min_lr_rate": st.sampled_from([0.1, 0.5]),
        "warmup_lr_rate": st.sampled_from([0.1, 0.01]),
    },
    "warmup_stable_decay": {
        "num_decay_steps": st.integers(1, 5),
        "warmup_type": st.sampled_from(["linear", "cosine", "1-sqrt"]),
        "decay_type": st.sampled_from(["linear", "cosine", "1-sqrt"]),
        "min_lr_ratio": LOW,
    },
}
"""What Transformers' `get_scheduler` hands on, by the scheduler's name."""

NEEDED = {"warmup_stable_decay": {"num_decay_steps"}}
MINIMAL = {
    "cosine_with_min_lr": {"min_lr": 1e-4},
    "cosine_warmup_with_min_lr": {"min_lr": 1e-4},
}


def of_transformers(name: str) -> st.SearchStrategy[Factory]:
    specific, needed = SPECIFIC.get(name, {}), NEEDED.get(name, set())
    drawn = st.fixed_dictionaries(
        {key: specific[key] for key in needed},
        optional={key: each for key, each in specific.items() if key not in needed},
    )
    if name in MINIMAL:  # one of two ways to say it, and a least is needed
        ways = [st.just(MINIMAL[name]), st.fixed_dictionaries(specific)]
        drawn = st.one_of(ways)

    def made(kwargs: dict[str, Any], warmup: int, total: int) -> Factory:
        return lambda optimizer: get_scheduler(
            name,
            optimizer,
            num_warmup_steps=warmup,
            num_training_steps=total,
            scheduler_specific_kwargs=kwargs,
        )

    return st.builds(made, drawn, st.integers(0, 4), st.integers(10, 14))


TRANSFORMERS_WITH_METRIC = {"reduce_lr_on_plateau", "greedy"}
TRANSFORMERS: dict[str, Row] = {
    each.value: lambda _groups, _, name=each.value: of_transformers(name)
    for each in optimization.SchedulerType
    if each.value not in TRANSFORMERS_WITH_METRIC
}

SCHEDULERS: dict[str, Row] = {**TORCH, **TRANSFORMERS}
