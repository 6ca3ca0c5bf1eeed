"""A shell agent in one file: it asks a model for a command, runs it with `sh` where it stands, and tells the model what
came out, until the model says `submit ANSWER`. The answer is printed and the program ends with status 0.

    TASK="find w7" OPENAI_BASE_URL=http://127.0.0.1:8000/v1 python -I -S agent.py

It works against any OpenAI-compatible endpoint that speaks plain http, and knows nothing of how its model is made.
$TASK is the first message; $MODEL (default "policy"), $OPENAI_API_KEY, $MAX_TURNS (default 4) and $MAX_TOKENS (default:
the endpoint's) are optional. It ends with status 0 and nothing printed when the turns ran out, with 1 and a sentence
on stderr when the endpoint or the settings are at fault.

Only json, os and socket are imported, and the interpreter is meant to be started with -I -S: http.client and
subprocess alone would cost more processor time than everything that this program does.
"""

import json
import os
import socket

COMMAND_OUTPUT = 4096  # bytes of a command's output that the model is told
REQUEST_SECONDS = 300.0  # silence of the endpoint for longer than this is an error
SUBMIT = "submit"


class Trouble(Exception):
    """The endpoint or the settings are at fault; the text says how."""


class Endpoint:
    """One kept-alive HTTP/1.1 connection to an OpenAI-compatible server."""

    def __init__(self, base_url, key):
        scheme, _, rest = base_url.partition("://")
        if scheme != "http":
            raise Trouble(f"OPENAI_BASE_URL is {base_url!r}: this agent speaks plain http only (http://HOST:PORT/v1)")
        authority, _, path = rest.partition("/")
        self.authority = authority.rpartition("@")[2]
        host, colon, port = self.authority.rpartition(":")
        if not colon or port.endswith("]"):  # no port; the colon of [::1] is not one
            host, port = self.authority, "80"
        if not host or not port.isdigit():
            raise Trouble(f"OPENAI_BASE_URL is {base_url!r}: it must look like http://HOST:PORT/v1")
        self.address = (host.strip("[]"), int(port))
        self.path = "/" + path.strip("/") if path.strip("/") else ""
        self.authorization = f"Authorization: Bearer {key}\r\n" if key else ""
        self.stream = None

    def post(self, path, body):
        """The decoded JSON that the server answers."""
        data = json.dumps(body).encode()
        head = (
            f"POST {self.path}{path} HTTP/1.1\r\nHost: {self.authority}\r\nContent-Type: application/json\r\n"
            f"Accept: application/json\r\n{self.authorization}Content-Length: {len(data)}\r\n\r\n"
        )
        reused = self.stream is not None
        try:
            status, answer = self._exchange(head.encode() + data)
        except (ConnectionError, EOFError):
            # A server may close an idle connection at any moment. On a fresh one it is the server's failure.
            self.close()
            if not reused:
                raise
            status, answer = self._exchange(head.encode() + data)
        if status != 200:
            raise Trouble(f"the model endpoint answered {status}: {answer[:500].decode('utf-8', 'replace')}")
        return json.loads(answer)

    def _exchange(self, request):
        if self.stream is None:
            connection = socket.create_connection(self.address, REQUEST_SECONDS)
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            self.stream = connection.makefile("rwb")
            connection.close()  # the stream keeps it open
        self.stream.write(request)
        self.stream.flush()
        status = 100
        while 100 <= status < 200:  # "100 Continue" and its like come before the answer
            status = int(self._line().split(None, 2)[1])
            headers = {}
            while line := self._line():
                name, _, value = line.partition(b":")
                headers[name.strip().lower()] = value.strip().lower()
        if b"chunked" in headers.get(b"transfer-encoding", b""):
            body = self._chunked()
        elif b"content-length" in headers:
            body = self._exactly(int(headers[b"content-length"]))
        else:
            body = self.stream.read()
            headers[b"connection"] = b"close"
        if b"close" in headers.get(b"connection", b""):
            self.close()
        return status, body

    def _chunked(self):
        parts = []
        while size := int(self._line().split(b";")[0], 16):
            parts.append(self._exactly(size))
            self._line()
        while self._line():  # trailers
            pass
        return b"".join(parts)

    def _line(self):
        line = self.stream.readline(65536)
        if not line.endswith(b"\n"):
            raise EOFError("the model endpoint closed the connection in the middle of an answer")
        return line.rstrip(b"\r\n")

    def _exactly(self, size):
        data = self.stream.read(size)
        if len(data) < size:
            raise EOFError("the model endpoint closed the connection in the middle of an answer")
        return data

    def close(self):
        if self.stream is not None:
            try:  # noqa: SIM105 - contextlib would be one more import
                self.stream.close()
            except OSError:
                pass  # unsent bytes of a connection that is gone
            self.stream = None


def shell(command):
    """What `command` writes to stdout and stderr together, the first COMMAND_OUTPUT bytes of it."""
    reading, writing = os.pipe()
    child = os.posix_spawnp(
        "sh",
        ["sh", "-c", command],
        os.environ,
        file_actions=[
            (os.POSIX_SPAWN_OPEN, 0, "/dev/null", os.O_RDONLY, 0),
            (os.POSIX_SPAWN_DUP2, writing, 1),
            (os.POSIX_SPAWN_DUP2, writing, 2),
        ],
    )
    os.close(writing)
    parts, kept = [], 0
    while data := os.read(reading, 65536):  # read to the end: a full pipe would stop the command
        parts.append(data[: COMMAND_OUTPUT - kept])
        kept += len(parts[-1])
    os.close(reading)
    os.waitpid(child, 0)
    return b"".join(parts).decode("utf-8", "replace")


def number(environ, name, default):
    """The whole number that a variable holds."""
    value = environ.get(name, str(default))
    if not value.isdigit():
        raise Trouble(f"{name} is {value!r}: it must be a whole number")
    return int(value)


def work(environ):
    """Ask, run, tell, until there is an answer: that answer, or None when the turns ran out."""
    if "OPENAI_BASE_URL" not in environ or "TASK" not in environ:
        raise Trouble("set OPENAI_BASE_URL (http://HOST:PORT/v1) and TASK (what the model is to do)")
    endpoint = Endpoint(environ["OPENAI_BASE_URL"], environ.get("OPENAI_API_KEY"))
    turns = number(environ, "MAX_TURNS", 4)
    messages = [{"role": "user", "content": environ["TASK"]}]
    request = {"model": environ.get("MODEL", "policy"), "messages": messages}
    if "MAX_TOKENS" in environ:
        request["max_tokens"] = number(environ, "MAX_TOKENS", 0)
    for _ in range(turns):
        message = endpoint.post("/chat/completions", request)["choices"][0]["message"]
        command = message.get("content") or ""
        messages.append({"role": "assistant", "content": command})
        words = command.split(None, 1)
        if words and words[0] == SUBMIT:
            return words[1].strip() if len(words) > 1 else ""
        # A NUL cannot be part of an argument; the command is the model's, so anything may be in it.
        messages.append({"role": "user", "content": shell(command.replace("\0", " ")) or "(empty)"})
    return None


def main():
    try:
        answer = work(os.environ)
    except (Trouble, EOFError, OSError) as error:
        trouble = str(error)
    except (ValueError, KeyError, IndexError, TypeError, AttributeError) as error:
        trouble = f"the model endpoint's answer is not a chat completion ({type(error).__name__}: {error})"
    else:
        if answer is not None:
            os.write(1, answer.encode(errors="replace") + b"\n")
        return 0
    os.write(2, f"agent: {trouble}\n".encode(errors="replace"))
    return 1


if __name__ == "__main__":
    raise SystemExit(main())
