"""Open an issue about a run that did not succeed, through GitHub's API.

usage: python .github/issue.py RUN_ID

The text names the failed jobs and links to the run and to its artifacts. Nothing of the run is
executed. A run that is started again gets no second issue.
"""

from __future__ import annotations

import os
import sys
from typing import Any

from commit import api

LABEL = "red-night"


def main(run_id: str) -> None:
    repo = f"repos/{os.environ['GITHUB_REPOSITORY']}"
    run = api(f"{repo}/actions/runs/{run_id}")
    jobs = api(f"{repo}/actions/runs/{run_id}/jobs?per_page=100")["jobs"]
    artifacts = api(f"{repo}/actions/runs/{run_id}/artifacts?per_page=100")["artifacts"]
    title = f"Red {run['name']} of {run['created_at'][:10]} ({run_id})"
    earlier = api(f"{repo}/issues?state=all&labels={LABEL}&per_page=100")
    if any(issue["title"] == title for issue in earlier):
        sys.stdout.write(f"there is an issue already: {title}\n")
        return
    failed = [job for job in jobs if job["conclusion"] not in ("success", "skipped")]
    files = [(each["name"], f"{run['html_url']}/artifacts/{each['id']}") for each in artifacts]
    commit = run["head_sha"][:12]
    lines = [
        f"[The run]({run['html_url']}) of `{commit}` ended with `{run['conclusion']}`.",
        *section("Jobs", [(job["name"], job["html_url"]) for job in failed]),
        *section("Artifacts", files),
    ]
    api(f"{repo}/issues", "POST", title=title, body="\n".join(lines), labels=[LABEL])
    sys.stdout.write(f"opened: {title}\n")


def section(title: str, links: list[tuple[Any, Any]]) -> list[str]:
    return ["", f"{title}:", "", *(f"- [{name}]({url})" for name, url in links)] if links else []


if __name__ == "__main__":
    main(sys.argv[1])
