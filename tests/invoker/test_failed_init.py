"""A function that does not load says why, with all that it printed, in the error that its requests get."""

from __future__ import annotations

from tests.invoker.platform import Host

NOT_LOADED = "The action failed to generate or locate a binary. See logs for details."
RAISES = "print('one')\nprint('two')\ndef helper():\n    raise ValueError('no such luck')\nhelper()\n"


def test_code_that_does_not_load_says_what_happened_and_what_it_printed(host: Host) -> None:
    """tests/runtime_python/test_proxy.py has the other ways in which code does not load."""
    host.deploy(RAISES)
    error = host.failed(host.launch())
    assert (error.code, error.message, error.printed_out) == ("InitFailed", NOT_LOADED, "one\ntwo\n")
    assert '/main__.py", line 4, in helper' in error.printed
    assert error.printed.rstrip().endswith("ValueError: no such luck")
    assert error.hint.endswith("ValueError: no such luck")
    assert "thaw_runtime" not in error.printed, "the platform's own frames are of no use to anybody"


def test_code_that_is_no_zip_and_a_process_that_is_killed_while_it_loads_say_so(host: Host) -> None:
    host.deploy("UEsDBBQ", binary=True)
    error = host.failed(host.launch())
    assert "Invalid action: its code is not a zip file that can be read" in error.printed
    host.deploy("import os\nprint('last words', flush=True)\nos.kill(os.getpid(), 9)\n", name="guest/killed")
    assert host.failed(host.launch(host.plan("guest/killed"))).printed_out == "last words\n"


def test_of_very_long_output_the_end_is_kept(host: Host) -> None:
    host.deploy("print('x' * 100_000 + 'the end')\nraise ValueError('so')\n")
    printed = host.failed(host.launch()).printed_out
    assert printed.startswith("[the beginning was left out]\nxxx")
    assert printed.endswith("the end\n")
    assert len(printed) < 20_000
