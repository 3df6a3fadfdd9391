"""A process of a stack: starts a program that only waits, and again whenever it has ended. Prints the pid of each."""

import os
import sys

from activities.confined import programs

SLEEPER = "tests.activities.confined.sleeper"

if __name__ == "__main__":
    programs._IMPORTS[SLEEPER] = ()
    while True:
        started = programs.start([sys.executable, "-P", "-m", SLEEPER], dict(os.environ), 2, 2)
        print(started.pid, flush=True)
        started.wait()
