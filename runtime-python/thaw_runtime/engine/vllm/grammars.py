"""Structured output: the grammar that an answer must follow, as vLLM's scheduler asks for it.

::

    submit ──▶ a process of the request: compile, accept the tokens so far ──first mask──▶ inbox ──▶ scheduler
                     ▲                                                                                 │
                     ╰── each sampled token; the next mask comes back while the model computes ────────╯

vLLM compiles in its own front end, with its own tokenizer, and computes the masks on the engine's thread.  This engine
has neither front end nor tokenizer, and some grammars take for ever to compile, or to compute one mask.  So each
request has its own process for both (grammar_process.py), which the kernel kills when it exceeds its processor time or
memory: that is the request's fault.  A process that is late without that is not: the machine is busy, and the gateway
sends the request again, here or elsewhere.  The scheduler gets only requests whose first mask is there.
"""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import threading
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any, Final

import torch
from vllm.sampling_params import StructuredOutputsParams
from vllm.v1.structured_output.backend_types import StructuredOutputGrammar
from vllm.v1.structured_output.utils import choice_as_grammar, grammar_is_likely_lark

from relay.clients.channel import Channel
from thaw.errors import BadParameter, ErrorInfo, InstanceBusy, PlatformError, ProtocolError, ThawError
from thaw.logs import print_traceback
from thaw_runtime.engine.grammar_process import MASK, REFUSED, TOKEN, Rules, schemas_of
from thaw_runtime.engine.json_schemas import Unenforced, narrowed
from thaw_runtime.engine.protocol import EngineRequest, Grammar, GrammarKind
from thaw_runtime.weights.tokenizer_files import TokenizerFiles

_PROCESS_S: Final = 60.0
"""Wall time for the process to import its libraries and prepare the vocabulary."""
_FIRST_MASK_S: Final = 30.0
_MASK_S: Final = 5.0
"""Wall time in which a busy machine can give a process the processor time that grammar_process.py allows."""
_END_S: Final = 5.0
_AT_ONCE: Final = 4
"""The number of grammars that are compiled at the same time."""
_TOO_COSTLY: Final = "it takes too much time or memory to follow this grammar"
_HINT: Final = "make it smaller, with less repetition inside repetition and fewer ways to write the same text"
_BUSY: Final = "this host is too busy to follow the answer's grammar"

MARKER: Final = StructuredOutputsParams(json_object=True)
"""Tells vLLM's scheduler that a request has a grammar.  The grammar itself is in another process."""


class FollowedGrammar(StructuredOutputGrammar):
    """The engine's side of a request's grammar.  Used by one thread at a time.

    When it cannot be followed any further, ``problem`` says why, the mask allows every token, and none is accepted.
    """

    def __init__(self, request: EngineRequest, sock: socket.socket, is_served: Callable[[], bool]) -> None:
        """``is_served``: False once the process has ended that makes those of the requests."""
        grammar = request.sampling.grammar
        assert grammar is not None  # noqa: S101  the caller has a request with one
        self._param, self._stops, self._sock = grammar.param, frozenset(request.sampling.stop_token_ids), sock
        self._is_served = is_served
        self.problem: ThawError | None = None
        self.is_begun = False  # True: no thread waits for the first mask any more
        self._is_over = False
        self._mask: torch.Tensor | None = None

    def wait(self, deadline_s: float) -> torch.Tensor | None:
        """The mask of the next token; None if there is a problem."""
        if self._mask is None and self.problem is None:
            self._sock.settimeout(deadline_s)
            received, is_late = b"", False
            try:
                received = self._sock.recv(1 << 20)
            except TimeoutError:
                is_late = True
            except OSError:
                pass  # the request's process has ended, as it has where nothing is received
            if received[:1] == MASK:
                self._mask = torch.frombuffer(bytearray(received[1:]), dtype=torch.int32)
            elif received[:1] == REFUSED:
                self.problem = BadParameter(*json.loads(received[1:]))
            elif is_late or not self._is_served():
                self.problem = InstanceBusy(_BUSY)
            else:
                self.problem = BadParameter(self._param, _TOO_COSTLY, hint=_HINT)
        return self._mask

    def accept_tokens(self, request_id: str, tokens: list[int]) -> bool:
        for token in tokens:
            if self._is_over:
                return True
            mask = self.wait(_MASK_S)
            if mask is None or not int(mask[token // 32]) >> token % 32 & 1:
                return False
            self._is_over = token in self._stops
            self._mask = None
            self.tell(token)
        return True

    def tell(self, token: int) -> None:
        try:
            self._sock.send(TOKEN.pack(token))
        except OSError:  # its process has ended; the wait for the next mask finds the reason
            pass

    def fill_bitmask(self, bitmask: torch.Tensor, batch_index: int) -> None:
        mask = self.wait(_MASK_S)
        if mask is None:
            bitmask[batch_index].fill_(-1)
        else:
            bitmask[batch_index].copy_(mask)

    def is_terminated(self) -> bool:
        return self._is_over

    def close(self) -> None:
        self._sock.close()

    def validate_tokens(self, tokens: list[int]) -> list[int]:
        raise NotImplementedError("for speculative decoding")

    def rollback(self, num_tokens: int) -> None:
        raise NotImplementedError("for speculative decoding")

    def reset(self) -> None:
        raise NotImplementedError("for speculative decoding")


@dataclass(frozen=True, slots=True)
class Constrained:
    """A request and its grammar, which has accepted the request's tokens so far and has the next mask ready."""

    request: EngineRequest
    grammar: FollowedGrammar


class Grammars:
    """The grammars of one engine.  It costs nothing before the first request with one."""

    def __init__(self, files: TokenizerFiles | None, vocab_size: int, n_threads: int) -> None:
        self._files, self._vocab_size, self._n_threads = files, vocab_size, max(1, n_threads)
        self._compiling = threading.Semaphore(_AT_ONCE)
        self._starting = threading.Lock()
        self._process: subprocess.Popen[bytes] | None = None
        self._lock = threading.Lock()  # protects the attributes below
        self._channel: Channel | None = None
        self._wanted: dict[str, FollowedGrammar | None] = {}  # None: its process has not begun

    def prepare(self, request: EngineRequest, ready: Callable[[Constrained | ErrorInfo], None]) -> None:
        """Begin a process for the request's grammar.  ``ready`` is called once, on a thread of its own, unless the
        request ends before.  Does not block."""
        with self._lock:
            self._wanted[request.request_id] = None
        # a daemon: an engine that ends waits for no grammar
        threading.Thread(target=self._prepare, args=(request, ready), name="grammar", daemon=True).start()

    def forget(self, request_id: str) -> None:
        """The request has ended: kill its process.  Does not block; an unknown request is ignored."""
        with self._lock:
            grammar = self._wanted.pop(request_id, None)
            if grammar is not None:
                self._tell({"end": request_id})
                if grammar.is_begun:  # otherwise a thread waits for its first mask
                    grammar.close()

    def close(self) -> None:
        """End all processes."""
        with self._lock:
            begun = [grammar for grammar in self._wanted.values() if grammar is not None and grammar.is_begun]
            self._wanted.clear()
            if self._channel is not None:
                self._channel.close()
        for grammar in begun:
            grammar.close()
        if self._process is not None:
            try:
                self._process.wait(_END_S)
            except subprocess.TimeoutExpired:
                self._process.kill()

    def _prepare(self, request: EngineRequest, ready: Callable[[Constrained | ErrorInfo], None]) -> None:
        try:
            with self._compiling:
                made = self._begun(request)
        except ThawError as e:
            ready(e.info())
        except Exception as e:  # noqa: BLE001  another worker would not do better with this request
            print_traceback()
            ready(PlatformError(f"the grammar cannot be followed: {type(e).__name__}: {e}").info())
        else:
            if made is not None:
                ready(made)

    def _begun(self, request: EngineRequest) -> Constrained | None:
        """Return the request with its first mask, or None if it has ended meanwhile.  Raises BadParameter,
        InstanceBusy, PlatformError."""
        grammar, stops = request.sampling.grammar, request.sampling.stop_token_ids
        assert grammar is not None  # noqa: S101  the caller asks for a request that has one
        if not stops:
            raise BadParameter(grammar.param, "nothing could end the answer: there is no end-of-sequence token")
        job = {"key": request.request_id, "stops": stops, "so_far": request.output_so_far, **asdict(rules_of(grammar))}
        self._ensure_process(grammar.param)
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        followed = FollowedGrammar(request, ours, self._has_process)
        with theirs, self._lock:
            if request.request_id not in self._wanted:
                return None
            self._wanted[request.request_id] = followed
            self._tell(job, theirs.fileno())
        followed.wait(_FIRST_MASK_S)
        with self._lock:
            followed.is_begun = request.request_id in self._wanted
        if not followed.is_begun:
            followed.close()
            return None
        if followed.problem is not None:
            raise followed.problem
        return Constrained(request, followed)

    def _ensure_process(self, param: str) -> None:
        """Raises BadParameter, InstanceBusy, PlatformError."""
        with self._starting:
            if self._has_process():
                return
            if self._files is None:
                raise BadParameter(param, "the checkpoint has no tokenizer.json, which structured output needs")
            ours, theirs = socket.socketpair()
            command = [sys.executable, "-m", "thaw_runtime.engine.grammar_process", str(theirs.fileno())]
            env = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
            with theirs:
                fd = theirs.fileno()
                process = subprocess.Popen(command, pass_fds=[fd], env=env, stdin=subprocess.DEVNULL)
            channel = Channel(ours)
            channel.set_timeout(_PROCESS_S)
            try:
                self._set_up(channel, self._files)
            except ThawError:
                channel.close()
                process.kill()
                process.wait()
                raise
            channel.set_timeout(_END_S)
            with self._lock:
                self._process, self._channel = process, channel

    def _has_process(self) -> bool:
        return self._process is not None and self._process.poll() is None

    def _set_up(self, channel: Channel, files: TokenizerFiles) -> None:
        """Raises InstanceBusy, PlatformError."""
        fd, n_bytes = os.memfd_create("tokenizer"), len(files.vocabulary)
        try:
            with open(fd, "wb", closefd=False) as f:
                f.write(files.vocabulary + files.dumped())
            sizes = {"vocab_size": self._vocab_size, "n_threads": self._n_threads, "vocabulary_bytes": n_bytes}
            channel.send(sizes, (fd,))
            channel.receive()
        except TimeoutError as e:
            raise InstanceBusy(_BUSY) from e
        except (OSError, ProtocolError) as e:
            raise PlatformError(f"the process that follows grammars does not start: {e}") from e
        finally:
            os.close(fd)

    def _tell(self, message: Any, *fds: int) -> None:
        """Send the grammar process a message.  The caller holds the lock.  An error is ignored: a process that has
        ended has also closed its requests' sockets."""
        assert self._channel is not None  # noqa: S101  the process has begun
        try:
            self._channel.send(message, fds)
        except OSError:
            pass


def rules_of(grammar: Grammar) -> Rules:
    """Raises BadParameter."""
    kind, text = grammar.kind, grammar.text
    if kind is GrammarKind.REGEX:
        return Rules("regex", text, grammar.param)
    if kind is GrammarKind.GRAMMAR:
        return Rules("lark" if grammar_is_likely_lark(text) else "ebnf", text, grammar.param)
    try:
        parsed = json.loads(text)
    except (ValueError, RecursionError) as e:
        raise BadParameter(grammar.param, f"this is not JSON: {e}") from e
    if kind is GrammarKind.CHOICE:
        return Rules("ebnf", choice_as_grammar(parsed), grammar.param)
    if kind is GrammarKind.JSON:
        return Rules("json", json.dumps(_narrowed(parsed, grammar.param)), grammar.param)
    for part, param in schemas_of(parsed, grammar.param, grammar.schema_params):
        if (part["type"], part.get("style", "json")) != ("json_schema", "json"):
            raise BadParameter(param, "a schema can be followed only in JSON", hint='use {"type": "json_schema"}')
        part["json_schema"] = _narrowed(part["json_schema"], param)
    return Rules("tag", json.dumps(parsed), grammar.param, grammar.schema_params)


def _narrowed(schema: Any, param: str) -> Any:
    """Raises BadParameter for a schema that answers cannot be held to."""
    try:
        return narrowed(schema)
    except Unenforced as e:
        hint = "leave it out of the schema and check it in the answer; docs/api.md has what can be followed"
        raise BadParameter(param, f"the schema cannot be followed: {e}", hint=hint) from None


def set_grammar(core: Any, request: Any, grammar: FollowedGrammar) -> None:
    """Give a vLLM request its grammar.  Also allocate the memory for a batch's masks, as vLLM's own back end would."""
    request.structured_output_request.grammar = grammar
    manager, config = core.structured_output_manager, core.vllm_config
    if manager._grammar_bitmask is None:
        n_rows, n_tokens = config.scheduler_config.max_num_seqs, config.model_config.get_vocab_size()
        manager._grammar_bitmask = torch.full((n_rows, -(-n_tokens // 32)), -1, dtype=torch.int32)
