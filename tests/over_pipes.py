"""Shard servers in separate processes, which can be killed; messages are pickled and sent through pipes."""

import contextlib
import itertools
import multiprocessing
import threading
from concurrent.futures import Future

from jaxrec.embedding.servers import ServerGone, ShardServer


def serve(pipe, *args):
    """The server process: answers messages one at a time until the pipe is closed."""
    server = ShardServer(*args)
    with contextlib.suppress(EOFError, ConnectionError):
        while True:
            number, verb, sender, given = pipe.recv()
            try:
                answer = server.answer(verb, sender, *given)
            except Exception as error:
                answer = error
            pipe.send((number, answer))


class OverPipe:
    """A connection to a shard server in another process, see `Server`."""

    def __init__(self, *args):
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(["jaxrec.embedding.servers"])
        self.pipe, theirs = context.Pipe()
        self.process = context.Process(target=serve, args=(theirs, *args), daemon=True)
        self.process.start()
        theirs.close()
        self.waiting, self.numbers, self.lock, self.gone = {}, itertools.count(), threading.Lock(), False
        threading.Thread(target=self.listen, name="over-pipe", daemon=True).start()

    def call(self, verb, sender, *args):
        answer, number = Future(), next(self.numbers)
        with self.lock:
            self.waiting[number] = answer
            try:
                self.pipe.send((number, verb, sender, args))
            except OSError:
                self.gone = True
        if self.gone:
            self.end()
        return answer

    def listen(self):
        with contextlib.suppress(EOFError, OSError):
            while True:
                number, found = self.pipe.recv()
                answer = self.waiting.pop(number)
                answer.set_exception(found) if isinstance(found, Exception) else answer.set_result(found)
        self.gone = True
        self.end()

    def end(self):
        with self.lock:
            waiting, self.waiting = self.waiting, {}
        for answer in waiting.values():
            answer.set_exception(ServerGone(f"process {self.process.pid} has ended"))

    def kill(self):
        self.process.kill()  # -9
        self.process.join()
