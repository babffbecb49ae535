"""A function that does not load says why, with all that it printed, in the error that its requests get."""

from __future__ import annotations

import base64
import io
import zipfile

import pytest

from tests.invoker.platform import Host
from thaw.instance import InstanceState

MAIN = "def main(args):\n    return {}\n"
RAISES = "print('one')\nprint('two')\ndef helper():\n    raise ValueError('no such luck')\nhelper()\n"


def packed(**files: str) -> str:
    data = io.BytesIO()
    with zipfile.ZipFile(data, "w") as archive:
        for name, text in files.items():
            archive.writestr(name.replace("_py", ".py"), text)
    return base64.b64encode(data.getvalue()).decode()


@pytest.mark.parametrize(
    ("code", "out", "err", "last"),
    [
        ("print('before')\ndef main(args:\n", "", '  File "__main__.py", line 2', "SyntaxError: '(' was never closed"),
        (RAISES, "one\ntwo\n", '  File "__main__.py", line 4, in helper', "ValueError: no such luck"),
        ("print('hi')\ndef niam(args): pass\n", "hi\n", "Invalid action: it has no function 'main'", ""),
        (
            packed(other_py=MAIN, data="x"),
            "",
            "Invalid action: the zip has no __main__.py at its top, only data, other.py",
            "",
        ),
        ("UEsDBBQ", "", "Invalid action: its code is not a zip file that can be read", ""),
        (
            "import sys\nprint('bye')\nsys.exit('enough')\n",
            "bye\n",
            "Invalid action: it exits while it is loaded: enough",
            "",
        ),
        ("import os\nprint('last words', flush=True)\nos.kill(os.getpid(), 9)\n", "last words\n", "", ""),
    ],
    ids=["syntax error", "raises", "no main", "zip without __main__", "no zip", "exits", "killed"],
)
def test_code_that_does_not_load_says_what_happened_and_what_it_printed(
    host: Host, code: str, out: str, err: str, last: str
) -> None:
    host.deploy(code, binary=code.startswith("UEsD"))
    gone = host.events.instance(host.launch(), InstanceState.GONE)
    assert gone.error is not None
    assert gone.error.printed_out == out
    assert err in gone.error.printed
    assert gone.error.printed.rstrip().endswith(last)
    assert "thaw_runtime" not in gone.error.printed, "the platform's own frames are of no use to anybody"


def test_of_very_long_output_the_end_is_kept(host: Host) -> None:
    host.deploy("print('x' * 100_000 + 'the end')\nraise ValueError('so')\n")
    gone = host.events.instance(host.launch(), InstanceState.GONE)
    assert gone.error is not None
    assert gone.error.printed_out.startswith("[the beginning was left out]\nxxx")
    assert gone.error.printed_out.endswith("the end\n")
    assert len(gone.error.printed_out) < 20_000
