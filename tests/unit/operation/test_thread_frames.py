"""The frames of all threads, while garbage is collected."""

import subprocess
import sys
import threading

from paths import ROOT

from parallelism.operation.thread_frames import frames_by_thread

SCRIPT = """
import faulthandler, gc, threading, time
from parallelism.operation.thread_frames import frames_by_thread

class Garbage:
    def __init__(self):
        self.me = self
    def __del__(self):
        time.sleep(1e-6)

def deep(depth):
    Garbage()
    return deep(depth - 1) if depth else frames_by_thread()

def work():
    for i in range(80):
        threading.Thread(target=int).start()
        assert threading.get_ident() in deep(i % 5)

faulthandler.dump_traceback_later(15, exit=True)
gc.set_threshold(2)
threads = [threading.Thread(target=work) for _ in range(4)]
for thread in threads:
    thread.start()
for thread in threads:
    thread.join()
print(gc.isenabled())
"""


def test_threads_that_look_while_garbage_is_collected_go_on():
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT], capture_output=True, text=True, check=False, cwd=ROOT, timeout=50)
    assert (done.stdout, done.returncode) == ("True\n", 0), done.stderr


def test_the_frame_of_this_thread_is_here():
    frame = frames_by_thread()[threading.get_ident()]
    while frame.f_code is not test_the_frame_of_this_thread_is_here.__code__:
        frame = frame.f_back
