"""Runs commands of ours, or pieces of Python, one after the other in one process: torch is imported once.

A list of {"words": […]} or {"code": "…"} comes as JSON on standard input; the first that fails ends it with its own
output, and its number on the last line.
"""

import json
import os
import sys
import traceback

from thoughtbubbles.cli import main


def run(task: dict[str, list[str] | str]) -> object:
    """What it exits with."""
    try:
        if "code" in task:
            exec(compile(str(task["code"]), "<documentation>", "exec"), {"__name__": "__main__"})
        else:
            main(list(task["words"]))
    except SystemExit as stopped:
        return stopped.code or 0
    except BaseException:
        traceback.print_exc()
        return 1
    return 0


if __name__ == "__main__":
    tasks, environment = json.load(sys.stdin), dict(os.environ)
    for number, task in enumerate(tasks):
        if code := run(task):
            sys.exit(f"{code}\n{number}")
        os.environ.clear()
        os.environ.update(environment)
