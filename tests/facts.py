# SPDX-License-Identifier: Apache-2.0
"""What accelfn's transforms tell, refuse and need, as tables in the reference.

`python -m tests.facts` writes them into docs/reference/transforms.md.
"""

import re
from pathlib import Path
from typing import Any

import accelfn as af
from tests.internals import FACTS, chain, facts_of

PAGE = Path(__file__).parents[1] / "docs" / "reference" / "transforms.md"
_PART = re.compile(r"(<!-- facts -->\n).*?(<!-- end of facts -->)", flags=re.DOTALL)
SHOWN: tuple[Any, ...] = (
    af.shard_data(),
    af.wrap_ddp(),
    af.wrap_ddp(bucket_cap_mb=0.5),
    af.wrap_ddp(static_graph=True),
    af.wrap_ddp(within="dp_shard"),
    af.wrap_fsdp(),
    af.wrap_fsdp(find_unused_parameters=True),
    af.wrap_fsdp(cpu_offload=True),
    af.wrap_deepspeed(2),
    af.context_parallel(),
    af.tensor_parallel({"up": "column", "down": "row"}),
    af.accumulate(num_micro_batches=2),
    af.autocast("bf16"),
    af.autocast("fp16"),
    af.autocast("fp8"),
    af.clip_grad_norm(1.0),
    af.clip_grad_value(1.0),
    af.compress("fp16"),
    af.compress("powersgd"),
    af.local_sgd(sync_every=8),
    af.diloco(sync_every=500),
    af.diloco(sync_every=500, bits=8),
    af.sync_batchnorm(),
    af.skip_nonfinite(),
    af.ema(0.999),
    af.plateau(),
    af.schedule_free(),
    af.compile(),
    af.compile(fullgraph=False),
    af.compile(backend="eager"),
    af.checkpoint_activations(),
    af.optimizer_in_backward(),
    af.check_replicas(every=100),
    af.identity(),
)
"""Every public transform, and again where options change what it says."""


def tables() -> str:
    """Return what each fact means, and what each transform says."""
    rows = [
        "| fact | says |",
        "| --- | --- |",
        *(f"| `{fact}` | {meaning} |" for fact, meaning in FACTS.items()),
        "",
        "| transform | tells | refuses | needs |",
        "| --- | --- | --- | --- |",
    ]
    for each in SHOWN:
        said = [
            facts_of(each),
            getattr(each, "refuses", {}),
            getattr(each, "needs", {}),
        ]
        names = [", ".join(f"`{n}`" for n in sorted(part)) for part in said]
        rows.append(f"| `{each!r}` | {' | '.join(names)} |")
    return "\n".join(rows) + "\n"


def page(text: str) -> str:
    """Return the page with the tables as they are now."""
    return _PART.sub(lambda found: f"{found[1]}{tables()}{found[2]}", text)


def public() -> set[type]:
    """Return the classes of accelfn's public transforms."""
    found = (getattr(af, name) for name in dir(af))
    return {
        each
        for each in found
        if isinstance(each, type)
        and getattr(each, "__accelfn_transform__", False)
        and each is not chain
    }


if __name__ == "__main__":
    PAGE.write_text(page(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
