# SPDX-License-Identifier: Apache-2.0
"""Tracks a small run with one backend, offline, and prints what its files then hold."""

import contextlib
import json
import math
import sys
import time
import zipfile
from pathlib import Path

import torch

import accelfn as af

WORLD = af.World.single(device="cpu")
IMAGE = torch.zeros(3, 4, 5, dtype=torch.uint8)


def run(tracker):
    """Track what every backend has; fail at the end, as a run may."""
    with contextlib.suppress(KeyError), tracker:
        setup = af.chain(af.shard_data(), af.clip_grad_norm(1.0))
        optimizer = {"lr": 0.1, "betas": (0.9, 0.99)}
        tracker.hyperparameters({"setup": setup, "optimizer": optimizer})
        tracker({"loss": torch.tensor(2.0), "lr": 0.1}, 1)
        tracker({"loss": math.nan}, 2)
        tracker.images({"seen": IMAGE, "grey": IMAGE[:1]}, 2)
        tracker({"loss": 1.0}, 3)
        raise KeyError


def tensorboard():
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
    from tensorboard.plugins.hparams import plugin_data_pb2

    run(af.track.tensorboard("board", world=WORLD))
    # a run that was loaded at step 2, and one that goes back by itself
    with af.track.tensorboard("board", world=WORLD, step=2) as tracker:
        tracker({"loss": 7.0}, 4)
        tracker({"loss": 8.0}, 5)
        tracker({"loss": 9.0}, 4)
    events = EventAccumulator("board").Reload()
    images = {name: events.Images(name)[0] for name in events.Tags()["images"]}
    tag = "_hparams_/session_start_info"
    told = plugin_data_pb2.HParamsPluginData.FromString(
        events.SummaryMetadata(tag).plugin_data.content
    ).session_start_info.hparams
    return {
        "loss": [[e.step, str(e.value)] for e in events.Scalars("loss")],
        "setup": told["setup"].string_value,
        "lr": told["optimizer.lr"].number_value,
        "images": sorted([n, i.width, i.height] for n, i in images.items()),
    }


def wandb():
    from wandb.proto import wandb_internal_pb2

    run(af.track.wandb("digits", world=WORLD, directory=".", offline=True))
    (file,) = Path("wandb").glob("offline-run-*/*.wandb")
    for _ in range(
        300
    ):  # its service may write the last record after `finish` returned
        data = leveldb_records(file.read_bytes()[7:])
        records = [wandb_internal_pb2.Record.FromString(each) for each in data]
        if any(each.HasField("exit") for each in records):
            break
        time.sleep(0.1)
    rows = [nested(each.history.item) for each in records]
    config = {
        item.key: json.loads(item.value_json)
        for each in records
        for item in each.config.update
    }
    (code,) = (each.exit for each in records if each.HasField("exit"))
    seen = next(row for row in rows if "seen" in row)
    return {
        "loss": [[r["step"], str(r["loss"]).lower()] for r in rows if "loss" in r],
        "images": [[n, seen[n]["width"], seen[n]["height"]] for n in ("grey", "seen")],
        "setup": config["setup"],
        "lr": config["optimizer"]["lr"],
        "exit": code.exit_code,
    }


def nested(items):
    """Return a row of W&B's history as a dict."""
    row = {}
    for item in items:
        *outer, inner = item.nested_key or [item.key]
        place = row
        for name in outer:
            place = place.setdefault(name, {})
        place[inner] = json.loads(item.value_json)
    return row


def leveldb_records(data):
    """Yield the records of a log in LevelDB's format, which W&B's files have."""
    whole, place = b"", 0
    while place + 7 <= len(data):
        left = 32768 - (place + 7) % 32768  # the file begins with 7 bytes of its own
        if left < 7:
            place += left
            continue
        size = int.from_bytes(data[place + 4 : place + 6], "little")
        kind = data[place + 6]  # whole, first, middle, last
        whole += data[place + 7 : place + 7 + size]
        place += 7 + size
        if kind in (1, 4):
            yield whole
            whole = b""


def comet():
    run(af.track.comet("digits", world=WORLD, directory="comet", offline=True))
    (file,) = Path("comet").glob("*.zip")
    with zipfile.ZipFile(file) as archive:
        lines = archive.read("messages.json").decode().splitlines()
    payloads = [json.loads(line)["payload"] for line in lines]
    metrics = [each["metric"] for each in payloads if "metric" in each]
    params = {
        each["param"]["paramName"]: each["param"]["paramValue"]
        for each in payloads
        if "param" in each
    }
    uploads = [each for each in payloads if "upload_type" in each]
    return {
        "loss": [
            [m["step"], str(m["metricValue"]).lower()]
            for m in metrics
            if m["metricName"] == "loss"
        ],
        "setup": params["setup"],
        "lr": params["optimizer.lr"],
        "images": sorted(
            each["additional_params"]["figName"]
            for each in uploads
            if each["upload_type"] == "visualization"
        ),
        "failed": any(each.get("key") == "failed" for each in payloads),
    }


def mlflow():
    from mlflow.tracking import MlflowClient

    tracker = af.track.mlflow("digits", world=WORLD, store="sqlite:///runs.db")
    _, run_id = tracker.backends["mlflow"]
    run(tracker)
    client = MlflowClient("sqlite:///runs.db")
    state = client.get_run(run_id).info.status
    with af.track.mlflow(
        "digits", world=WORLD, store="sqlite:///runs.db", run_id=run_id
    ) as tracker:
        tracker({"loss": 0.5}, 4)
    found = client.get_run(run_id)
    history = client.get_metric_history(run_id, "loss")
    names = {
        each.path.split("/")[-1] for each in client.list_artifacts(run_id, "images")
    }
    return {
        "loss": [[each.step, str(each.value)] for each in history],
        "setup": found.data.params["setup"],
        "lr": float(found.data.params["optimizer.lr"]),
        "images": sorted({name.split("+")[0] for name in names}),
        "status": [state, found.info.status],
    }


if __name__ == "__main__":
    print("told:", json.dumps(globals()[sys.argv[1]]()))  # noqa: T201 - for the test
