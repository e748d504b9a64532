"""Open MPI's and MPICH's Allreduce of f32, from one buffer into another. Started by mpirun or mpiexec."""

import numpy
from mpi4py import MPI

import protocol


def main() -> None:
    arguments = protocol.arguments()
    world = MPI.COMM_WORLD
    for size_bytes in arguments.bytes:
        given = numpy.full(size_bytes // 4, world.rank + 1, numpy.float32)
        result = numpy.empty_like(given)
        expected = numpy.full_like(given, world.size * (world.size + 1) // 2)

        def prepare(iteration):
            given[::256] = world.rank + iteration
            expected[::256] = world.size * (world.size - 1) // 2 + world.size * iteration
            result.fill(numpy.nan)

        def slowest(times):
            mine, all_ranks = numpy.array(times), numpy.empty(len(times))
            world.Allreduce(mine, all_ranks, MPI.MAX)
            return all_ranks.tolist()

        times, right = protocol.measure(
            size_bytes,
            prepare,
            world.Barrier,
            lambda: world.Allreduce(given, result),
            lambda _: numpy.array_equal(result, expected),
            slowest,
        )
        verified = world.allreduce(right, MPI.LAND)
        if world.rank == 0:
            protocol.report(arguments.peer, world.size, "fp32", size_bytes, times, verified)


main()
