"""Two processes that form a process group, for tests of what happens on several ranks."""

import time
import traceback
from datetime import timedelta

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

COUNT = 2
START, JOB = 120, 120  # seconds until a process must have come up, and a job must be done


class Ranks:
    """Starts the processes when they are needed, and anew after a job that failed: what collectives wait for then is unknown."""

    def __init__(self, folder):
        self.folder, self.starts = folder, 0
        self.processes = []

    def run(self, function, *arguments, **options):
        """Calls a function of a module on every rank. What one of them raises fails the test."""
        if not self.processes:
            self.start()
        for connection in self.connections:
            connection.send((function, arguments, options))
        answers = self.answers(JOB)
        if any(answers):
            self.stop()
            raise AssertionError("\n".join(f"rank {rank}: {text}" for rank, text in enumerate(answers) if text))

    def start(self):
        context = mp.get_context("spawn")
        self.starts += 1
        pipes = [context.Pipe() for _ in range(COUNT)]
        self.connections = [mine for mine, _ in pipes]
        for rank, (_, theirs) in enumerate(pipes):
            process = context.Process(target=serve, args=(rank, f"{self.folder}/{self.starts}", theirs), daemon=True)
            process.start()
            theirs.close()
            self.processes.append(process)
        answers = self.answers(START)
        assert not any(answers), answers

    def answers(self, seconds):
        """One from each rank: empty, or what went wrong."""
        end = time.monotonic() + seconds
        texts = []
        for connection in self.connections:
            try:
                there = connection.poll(max(end - time.monotonic(), 0))
                texts.append(connection.recv() if there else f"no answer within {seconds} s")
            except EOFError:
                texts.append("the process ended")
        return texts

    def stop(self):
        for connection, process in zip(self.connections, self.processes):
            connection.close()
            process.kill()
            process.join()
        self.processes = []


def serve(rank, path, connection):
    torch.set_num_threads(1)
    try:
        dist.init_process_group(
            "gloo", f"file://{path}", rank=rank, world_size=COUNT, timeout=timedelta(seconds=JOB / 2)
        )
        connection.send("")
        while True:
            function, arguments, options = connection.recv()
            function(*arguments, **options)
            connection.send("")
    except EOFError:
        pass  # the tests have ended
    except BaseException:
        connection.send(traceback.format_exc())
