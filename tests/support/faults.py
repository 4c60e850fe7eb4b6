"""What the fault proxy can do to a request, and which request a rule hits."""

from __future__ import annotations

import random
import threading
from collections.abc import Callable
from dataclasses import dataclass, field


@dataclass(frozen=True)
class Status:
    """Answer with an S3 error of our own; the server never sees the request.

    `Status(200, "InternalError")` is what S3 may answer to CompleteMultipartUpload.
    """

    status: int = 503
    code: str = "SlowDown"


@dataclass(frozen=True)
class Reset:
    """Reset the connection; the server never sees the request."""


@dataclass(frozen=True)
class Lose:
    """Let the server carry the request out, then reset the connection instead of passing the answer on."""


@dataclass(frozen=True)
class Cut:
    """Close the connection after `after_bytes` of the answer's body; after half of it if None."""

    after_bytes: int | None = None


@dataclass(frozen=True)
class CutUpload:
    """Send the server `after_bytes` of the request's body (half if None), then reset both connections."""

    after_bytes: int | None = None


@dataclass(frozen=True)
class Corrupt:
    """Flip all bits of the byte at `offset` of the answer's body; in its middle if None."""

    offset: int | None = None


@dataclass(frozen=True)
class Delay:
    """Hold the request back for a time."""

    seconds: float


@dataclass(frozen=True)
class Stall:
    """Hold the request until `released` is set or the proxy stops, then carry on.

    Args:
        forward_first: let the server carry the request out before holding the answer.
    """

    forward_first: bool = False
    arrived: threading.Event = field(default_factory=threading.Event)
    released: threading.Event = field(default_factory=threading.Event)


@dataclass(frozen=True)
class Call:
    """Call `function`, then carry on: once the request is here, or once the server has carried it out."""

    function: Callable[[], object]
    forward_first: bool = False


Action = Status | Reset | Lose | Cut | CutUpload | Corrupt | Delay | Stall | Call


@dataclass
class Exchange:
    """One request and what became of it.

    Attributes:
        operation: PUT, GET, HEAD, DELETE, LIST, COPY, PART, CREATE_MPU, COMPLETE_MPU, ABORT_MPU, DELETE_MANY.
        key: path without the bucket, decoded.
        request_bytes: bytes of body received from the client.
        response_bytes: bytes of body sent to the client.
        status: of the answer that the client got the head of; None if none.
        fault: name of the injected action, or None.
    """

    method: str
    path: str
    query: dict[str, str]
    headers: dict[str, str]
    request_bytes: int = 0
    response_bytes: int = 0
    status: int | None = None
    fault: str | None = None

    @property
    def key(self) -> str:
        return self.path.lstrip("/").partition("/")[2]

    @property
    def signature(self) -> str:
        """What the request is signed with, key included: in a header, or in the url."""
        return self.headers.get("authorization") or f"Credential={self.query.get('X-Amz-Credential', '')}"

    @property
    def range(self) -> str | None:
        return self.headers.get("range")

    @property
    def operation(self) -> str:
        if self.method == "PUT":
            if "partNumber" in self.query:
                return "PART"
            return "COPY" if "x-amz-copy-source" in self.headers else "PUT"
        if self.method == "POST":
            by_query = {"uploads": "CREATE_MPU", "uploadId": "COMPLETE_MPU", "delete": "DELETE_MANY"}
            return next((name for mark, name in by_query.items() if mark in self.query), "POST")
        if self.method == "GET" and not self.key:
            return "LIST"
        return "ABORT_MPU" if self.method == "DELETE" and "uploadId" in self.query else self.method


@dataclass
class Rule:
    """When to inject what. `seen` counts matching requests, `fired` those that the action hit."""

    action: Action
    matches: Callable[[Exchange], bool]
    skip: int
    times: int | None
    probability: float
    random: random.Random
    seen: int = 0
    fired: int = 0

    def take(self, exchange: Exchange) -> bool:
        """Count `exchange` and say whether the action hits it."""
        if not self.matches(exchange):
            return False
        self.seen += 1
        exhausted = self.times is not None and self.fired >= self.times
        if self.seen <= self.skip or exhausted or self.random.random() >= self.probability:
            return False
        self.fired += 1
        return True
