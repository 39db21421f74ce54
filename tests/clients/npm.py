"""The official Node client, installed once for a machine into its folder for temporary files, and programs over it."""

import asyncio
import fcntl
import json
import shutil
import subprocess
import tempfile
import uuid
from pathlib import Path
from typing import Any, Final

VERSION: Final = "7.55.0"
PROGRAMS: Final = Path(__file__).parent / "node"
INSTALL_SECONDS: Final = 25.0
RUN_SECONDS: Final = 25.0


class MissingPackage(RuntimeError):
    """Node or its package is not to be had here; the message says why."""


class Node:
    """Runs the programs of `node/`."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    async def run(self, program: str, environ: dict[str, str]) -> Any:
        """Run a program and return its report. Raises RuntimeError with its other output if it fails."""
        here = self._folder / f"run-{uuid.uuid4().hex}"
        shutil.copytree(PROGRAMS, here)
        try:
            process = await asyncio.create_subprocess_exec(
                "node",
                str(here / f"{program}.mjs"),
                stdout=asyncio.subprocess.PIPE,
                stderr=asyncio.subprocess.PIPE,
                env=environ,
            )
            async with asyncio.timeout(RUN_SECONDS):
                out, err = await process.communicate()
        finally:
            shutil.rmtree(here)
        if process.returncode:
            raise RuntimeError(err.decode()[-2000:])
        return json.loads(out)


def install() -> Node:
    """Node with the client beside it; raises MissingPackage."""
    if shutil.which("node") is None or shutil.which("npm") is None:
        raise MissingPackage("node and npm are not installed")
    folder = Path(tempfile.gettempdir()) / f"baton-clients-openai-{VERSION}"
    folder.mkdir(exist_ok=True)
    with (folder / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not _is_installed(folder):
            _npm(folder)
    return Node(folder)


def _is_installed(folder: Path) -> bool:
    try:
        version: str = json.loads((folder / "node_modules" / "openai" / "package.json").read_text())["version"]
    except (OSError, ValueError):
        return False
    return version == VERSION and (folder / "whole").exists()


def _npm(folder: Path) -> None:
    (folder / "package.json").write_text(json.dumps({"private": True, "type": "module"}))
    quiet = ("--ignore-scripts", "--no-audit", "--no-fund", "--no-package-lock", "--loglevel=error")
    try:
        process = subprocess.run(
            ["npm", "install", *quiet, f"openai@{VERSION}"],
            cwd=folder,
            capture_output=True,
            check=False,
            timeout=INSTALL_SECONDS,
        )
    except subprocess.TimeoutExpired:
        raise MissingPackage(f"npm could not install openai@{VERSION} within {INSTALL_SECONDS:g} s") from None
    if process.returncode:
        raise MissingPackage(f"npm could not install openai@{VERSION}: there may be no network")
    (folder / "whole").touch()
