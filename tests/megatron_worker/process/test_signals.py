"""A process whose main thread waits in a queue is ended by a signal, whichever of its threads takes it."""

import subprocess
import sys

WAITS = """
import queue, signal, sys, threading, time
from megatron_worker.process.startup import on_signals

waiting = queue.SimpleQueue()
on_signals(lambda: waiting.put(None))
idle = threading.Thread(target=threading.Event().wait, daemon=True)
idle.start()
threading.Timer(0.2, lambda: signal.pthread_kill(idle.ident, signal.SIGTERM)).start()
waiting.get()
print("ended")
"""


def test_a_signal_that_another_thread_takes_ends_a_wait():
    done = subprocess.run([sys.executable, "-c", WAITS], capture_output=True, text=True, timeout=60)
    assert (done.stdout, done.stderr) == ("ended\n", "")
