"""PyTorch's Gloo all_reduce, in place (it has no other), of f32 or f16. One process per rank, by RANK, WORLD_SIZE,
MASTER_ADDR and MASTER_PORT.

For fp16 the tensor holds half as many bytes: sizes are those of the gradients in f32, and the conversions from and to
f32 are timed with the operation, as they are in gradwire.
"""

import torch
import torch.distributed as distributed

import protocol


def main() -> None:
    arguments = protocol.arguments()
    torch.set_num_threads(1)
    distributed.init_process_group("gloo")
    rank, ranks = distributed.get_rank(), distributed.get_world_size()
    for size_bytes in arguments.bytes:
        given = torch.full((size_bytes // 4,), float(rank + 1))
        expected = torch.full_like(given, ranks * (ranks + 1) // 2)
        wire = torch.empty(size_bytes // 4, dtype=torch.float16 if arguments.wire == "fp16" else torch.float32)
        result = torch.empty_like(given) if arguments.wire == "fp16" else wire

        def prepare(iteration):
            # Values stay whole numbers below 2048, which fp16 holds exactly.
            given[::256] = float(rank + iteration % 500)
            expected[::256] = float(ranks * (ranks - 1) // 2 + ranks * (iteration % 500))
            wire.copy_(given) if arguments.wire == "fp32" else result.fill_(float("nan"))

        def operation():
            if arguments.wire == "fp16":
                wire.copy_(given)
                distributed.all_reduce(wire)
                result.copy_(wire)
            else:
                distributed.all_reduce(wire)

        def slowest(times):
            all_ranks = torch.tensor(times, dtype=torch.float64)
            distributed.all_reduce(all_ranks, distributed.ReduceOp.MAX)
            return all_ranks.tolist()

        times, right = protocol.measure(
            size_bytes, prepare, distributed.barrier, operation, lambda _: torch.equal(result, expected), slowest
        )
        verified = torch.tensor([int(right)])
        distributed.all_reduce(verified, distributed.ReduceOp.MIN)
        if rank == 0:
            protocol.report(arguments.peer, ranks, arguments.wire, size_bytes, times, verified.item() == 1)


main()
