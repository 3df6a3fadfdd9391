"""Start a grader's sandbox as whoever runs this, with the standard library alone: `FOLDER [BWRAP]`, frames on stdin."""

import json
import os
import sys
from pathlib import Path

from activities import isolation

folder, *found = sys.argv[1:]
limits = {"folder": folder, "parent_pid": os.getppid(), "in_bubblewrap": bool(found), "time_s": 2}
program = ["-m", "activities.grading.sandbox_process", json.dumps(limits | {"memory_bytes": 1 << 28})]
environment = {"PYTHONHASHSEED": "0"}
if found:
    packages = [Path(os.environ["PYTHONPATH"]) / "activities"]
    start = isolation.BubblewrapStart(packages, environment, ["CAP_SYS_ADMIN"], ["--as-pid-1"])
    command = isolation.isolated_command(found[0], program, start, isolation.namespace_options()[0])
else:
    command = [sys.executable, "-S", "-P", "-s", *program]
os.execve(command[0], command, environment | {"PYTHONPATH": os.environ["PYTHONPATH"]})
