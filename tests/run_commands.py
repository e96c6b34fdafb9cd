"""Runs our commands, or pieces of Python, one after the other in one process, so that torch is imported once.

Reads a JSON list of {"words": […]} or {"code": "…"} from standard input; stops at the first that fails, with its output
and its number on the last line.
"""

import json
import os
import sys
import traceback

from thoughtbubbles.cli import main


def run(task: dict[str, list[str] | str]) -> object:
    """The exit code."""
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
