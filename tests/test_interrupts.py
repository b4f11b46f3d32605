"""A process that leaves its compiling threads behind leaves no file half written."""

import subprocess
import sys
from pathlib import Path

LEAVE = """
import threading, time
from pathlib import Path
from jaxspec.interrupts import COMPILING, end_while_compiling

def work():
    compiled.write_text("half")
    code = compile(LATER, "somewhere/lru_cache.py", "exec")
    begun.set()
    exec(code)

LATER = "time.sleep(0.5); compiled.write_text('whole'); done.set()"
compiled, begun, done = Path({file!r}), threading.Event(), threading.Event()
writer = threading.Thread(target=lambda: (work(), time.sleep(60)), name=COMPILING, daemon=True)
writer.start()
begun.wait()
time.sleep(0.1)
end_while_compiling(7)
"""


def test_only_what_is_being_kept_is_waited_for(tmp_path):
    file = tmp_path / "program"
    root = Path(__file__).parents[1]
    code = LEAVE.replace("{file!r}", repr(str(file)))
    ran = subprocess.run([sys.executable, "-c", code], cwd=root, timeout=50)
    assert ran.returncode == 7
    assert file.read_text() == "whole"


def test_nothing_ends_where_nobody_compiles():
    code = "from jaxspec.interrupts import end_while_compiling; end_while_compiling(7); print('on')"
    root = Path(__file__).parents[1]
    ran = subprocess.run([sys.executable, "-c", code], cwd=root, capture_output=True, text=True)
    assert (ran.returncode, ran.stdout) == (0, "on\n")
