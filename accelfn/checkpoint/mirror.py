# SPDX-License-Identifier: Apache-2.0
"""`Mirror`: copies of a store's checkpoints in an object store, such as S3, by fsspec."""

from collections.abc import Mapping
from pathlib import Path

from accelfn.base.arguments import exists, is_file, package
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
        self._seen = set[int]()

    def copy(self, directory: Path) -> None:
        """Copy the checkpoints of a directory, and remove those that it no longer has.

        An earlier copy may have failed, so each checkpoint that is not whole at the URL is
        copied. Only steps that the directory had before are removed.
        """
        local, at_url = manifest.checkpoints_in(directory), self._steps()
        if not self._seen:
            self._check_same_run(local, at_url)
        for step, folder in local.items():
            if not at_url.get(step):
                # a copy that was cut off may have left files of another number of ranks
                self._remove(step)
                self._send(folder)
        # last, so that the URL always has a whole checkpoint
        for step, is_whole in at_url.items():
            if step not in local and (step in self._seen or not is_whole):
                self._remove(step)
        self._seen |= local.keys()

    def fetch(self, directory: Path, step: int | None) -> None:
        """Copy a step, or the newest one, into a directory that does not have it yet."""
        steps = [at for at, is_whole in self._steps().items() if is_whole]
        newest = max(steps, default=-1)
        if step is None and newest < max(manifest.steps_in(directory), default=-1):
            return
        step = newest if step is None else step
        folder = directory / manifest.name_of(step)
        if step not in steps or exists(folder):
            return
        begin = f"{self._folder(step)}/"
        with commit.new_directory(folder) as partial:
            for path in self._files.find(begin):
                target = partial / path.removeprefix(begin)
                target.parent.mkdir(parents=True, exist_ok=True)
                self._files.get_file(path, str(target))
            for path in partial.rglob("*"):
                files.flush(path)

    def _folder(self, step: int) -> str:
        return f"{self._root}/{manifest.name_of(step)}"

    def _check_same_run(
        self, local: Mapping[int, Path], at_url: Mapping[int, bool]
    ) -> None:
        """Raise `ArgumentError` if the URL has newer checkpoints, or others of equal steps."""
        newest = max(local)
        for step in (step for step, is_whole in at_url.items() if is_whole):
            is_other = step > newest
            if step in local:
                data = self._files.cat_file(f"{self._folder(step)}/{manifest.NAME}")
                is_other = data != (local[step] / manifest.NAME).read_bytes()
            if is_other:
                name = manifest.name_of(step)
                msg = (
                    f"af.CheckpointStore(mirror=...): {self._root} has another run's {name}. Call"
                    " store.restore before the first save to continue that run, or use another URL."
                )
                raise ArgumentError(msg)

    def _steps(self) -> dict[int, bool]:
        """Return the steps of the checkpoints at the URL, and whether each is whole."""
        self._files.invalidate_cache()
        try:
            paths = self._files.ls(self._root, detail=False)
        except FileNotFoundError:
            return {}
        steps = (manifest.step_of(Path(path)) for path in paths)
        return {
            step: self._files.exists(f"{self._folder(step)}/{manifest.NAME}")
            for step in steps
            if step is not None
        }

    def _send(self, folder: Path) -> None:
        paths = [path for path in folder.rglob("*") if is_file(path)]
        for path in sorted(paths, key=lambda path: path == folder / manifest.NAME):
            target = f"{self._root}/{path.relative_to(folder.parent).as_posix()}"
            self._files.makedirs(target.rpartition("/")[0], exist_ok=True)
            self._files.put_file(str(path), target)

    def _remove(self, step: int) -> None:
        folder = self._folder(step)
        if self._files.exists(f"{folder}/{manifest.NAME}"):
            self._files.rm_file(f"{folder}/{manifest.NAME}")
        if self._files.exists(folder):
            self._files.rm(folder, recursive=True)
