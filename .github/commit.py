"""Commit the files of a folder through GitHub's API, never to the default branch.

usage: python .github/commit.py [--propose] BRANCH MESSAGE ROOT [FOLDER]

Commits the files of ROOT, or of its subfolder FOLDER, under their paths relative to ROOT. --propose
resets the branch to the default branch first, and opens a pull request if none is open.
"""

from __future__ import annotations

import argparse
import base64
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any


class ApiError(Exception):
    """GitHub's API returned an error."""


def api(path: str, method: str = "GET", **body: object) -> Any:
    """Call the API through gh, which takes its token from the environment."""
    command = ["gh", "api", "--method", method, path]
    process = subprocess.run(
        [*command, "--input", "-"] if body else command,
        input=json.dumps(body) if body else None,
        capture_output=True,
        text=True,
        check=False,
    )
    if process.returncode:
        raise ApiError(f"{method} {path}: {process.stderr.strip()}")
    return json.loads(process.stdout or "null")


def get_if_present(path: str) -> Any:
    try:
        return api(path)
    except ApiError as error:
        if "HTTP 404" in str(error):
            return None
        raise


def commit(branch: str, message: str, root: Path, folder: Path, *, propose: bool) -> None:
    files = sorted(p for p in folder.rglob("*") if p.is_file() and not p.is_symlink())
    if not files:
        sys.stdout.write("nothing to commit\n")
        return
    repo = f"repos/{os.environ['GITHUB_REPOSITORY']}"
    main = api(repo)["default_branch"]
    if branch == main:
        raise SystemExit(f"{branch} is the default branch: this script does not write there")
    base = api(f"{repo}/git/ref/heads/{main}")["object"]["sha"]
    if get_if_present(f"{repo}/git/ref/heads/{branch}") is None:
        api(f"{repo}/git/refs", "POST", ref=f"refs/heads/{branch}", sha=base)
    elif propose:
        api(f"{repo}/git/refs/heads/{branch}", "PATCH", sha=base, force=True)
    for file in files:
        path = file.relative_to(root).as_posix()
        present = get_if_present(f"{repo}/contents/{path}?ref={branch}")
        content = base64.b64encode(file.read_bytes()).decode()
        fields = {"message": message, "branch": branch, "content": content}
        replaced = {"sha": present["sha"]} if present else {}
        api(f"{repo}/contents/{path}", "PUT", **fields, **replaced)
        sys.stdout.write(f"{branch}: {path}\n")
    if propose:
        owner = os.environ["GITHUB_REPOSITORY"].partition("/")[0]
        if not api(f"{repo}/pulls?state=open&head={owner}:{branch}"):
            body = (
                "Proposed by the workflow `record-night`. Check the ratios before you merge. "
                "Claims that failed are left out: `python -m pytest_aiperf accept` accepts them."
            )
            api(f"{repo}/pulls", "POST", title=message, head=branch, base=main, body=body)


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--propose", action="store_true")
    parser.add_argument("branch")
    parser.add_argument("message")
    parser.add_argument("root", type=Path)
    parser.add_argument("folder", nargs="?", default=".")
    args = parser.parse_args()
    commit(args.branch, args.message, args.root, args.root / args.folder, propose=args.propose)
