# SPDX-License-Identifier: Apache-2.0
"""`Mirror`: copies of a store's checkpoints in an object store, such as S3, by fsspec."""

from collections.abc import Mapping
from pathlib import Path

from accelfn.base.arguments import exists, package
from accelfn.checkpoint import commit, files, manifest
from accelfn.errors import ArgumentError


class Mirror:
    """Copies a store's checkpoints to a URL, and back; only rank 0 uses it.

    Law: if a copy is cut off at any request, each step at the URL that has a manifest is a
    whole checkpoint: the manifest is written after all other files, and removed before them.
    """

    def __init__(self, url: str) -> None:
        """Open the file system of a URL; this makes no request.

        Raises:
            ArgumentError: fsspec is missing, or does not know the URL's protocol.
        """
        call = f"af.CheckpointStore(mirror={url!r})"
        core = package("fsspec.core", call=call, extra="remote", error=ArgumentError)
        try:
            self._files, self._root = core.url_to_fs(url)
        except (ImportError, TypeError, ValueError) as error:
            msg = f"{call}: fsspec cannot open the URL: {error}"
            raise ArgumentError(msg) from error
        self._seen = set[str]()

    def copy(self, directory: Path) -> None:
        """Copy the checkpoints of a directory, and remove those that it no longer has.

        An earlier copy may have failed, so each checkpoint that is not whole at the URL is
        copied. Only steps that the directory had before are removed.
        """
        local = {
            path.name: path for path in manifest.checkpoints_in(directory).values()
        }
        at_url = self._names()
        if not self._seen:
            self._check_same_run(local, at_url)
        for name, folder in local.items():
            if not at_url.get(name):
                # a copy that was cut off may have left files of another number of ranks
                self._remove(name)
                self._send(folder)
        # last, so that the URL always has a whole checkpoint
        for name, is_whole in at_url.items():
            if name not in local and (name in self._seen or not is_whole):
                self._remove(name)
        self._seen |= local.keys()

    def fetch(self, directory: Path, step: int | None) -> None:
        """Copy a step, or the newest one, into a directory that does not have it yet."""
        steps = {
            step_at: name
            for name, is_whole in self._names().items()
            if is_whole and (step_at := manifest.step_of(Path(name))) is not None
        }
        newest = max(steps, default=-1)
        if step is None and newest < max(manifest.steps_in(directory), default=-1):
            return
        name = steps.get(newest if step is None else step)
        if name is None or exists(directory / name):
            return
        begin = f"{self._root}/{name}/"
        with commit.new_directory(directory / name) as partial:
            for path in self._files.find(begin):
                target = partial / path.removeprefix(begin)
                target.parent.mkdir(parents=True, exist_ok=True)
                self._files.get_file(path, str(target))
            for path in partial.rglob("*"):
                files.flush(path)

    def _check_same_run(
        self, local: Mapping[str, Path], at_url: Mapping[str, bool]
    ) -> None:
        """Raise `ArgumentError` if the URL has newer checkpoints, or others of equal steps."""
        newest = max(local)
        for name in (name for name, is_whole in at_url.items() if is_whole):
            path = f"{self._root}/{name}/{manifest.NAME}"
            is_other = (
                name in local
                and self._files.cat_file(path)
                != (local[name] / manifest.NAME).read_bytes()
            )
            if name > newest or is_other:
                msg = (
                    f"af.CheckpointStore(mirror=...): {self._root} has another run's {name}. Call"
                    " store.restore before the first save to continue that run, or use another URL."
                )
                raise ArgumentError(msg)

    def _names(self) -> dict[str, bool]:
        """Return the names of the checkpoints at the URL, and whether each is whole."""
        self._files.invalidate_cache()
        try:
            paths = self._files.ls(self._root, detail=False)
        except FileNotFoundError:
            return {}
        names = (path.rstrip("/").rpartition("/")[2] for path in paths)
        return {
            name: self._files.exists(f"{self._root}/{name}/{manifest.NAME}")
            for name in names
            if manifest.step_of(Path(name)) is not None
        }

    def _send(self, folder: Path) -> None:
        paths = [path for path in folder.rglob("*") if path.is_file()]
        for path in sorted(paths, key=lambda path: path == folder / manifest.NAME):
            target = f"{self._root}/{path.relative_to(folder.parent).as_posix()}"
            self._files.makedirs(target.rpartition("/")[0], exist_ok=True)
            self._files.put_file(str(path), target)

    def _remove(self, name: str) -> None:
        folder = f"{self._root}/{name}"
        if self._files.exists(f"{folder}/{manifest.NAME}"):
            self._files.rm_file(f"{folder}/{manifest.NAME}")
        if self._files.exists(folder):
            self._files.rm(folder, recursive=True)
