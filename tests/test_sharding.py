"""How data is divided over ranks: n ranks with batches of b see, step by step, what one process with n·b would see.

The yardstick is torch's own loader in one process, with the random state of rank 0. Samples are numbers, and a run is
the list of its epochs, an epoch the list of its batches, a batch the list of its samples.
"""

from __future__ import annotations

import itertools
import logging
import os
import random
import re
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy
import pytest
import torch
import torch.distributed as dist
from parallel import seed_differently
from ranks import run_on_ranks
from torch import nn
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    Dataset,
    DistributedSampler,
    IterableDataset,
    Sampler,
    SubsetRandomSampler,
    WeightedRandomSampler,
    get_worker_info,
)

from pellucid.engine import DDP, DataError, Engine, Events, already_sharded

SAMPLES, BATCH, EPOCHS = 24, 2, 2
SEED_OF_RANK_0 = 100  # as seed_differently gives it
Run = list[list[list[int]]]


# ---------------------------------------------------------------------- runs, and the yardstick


def ids_of(batch: Any) -> list[int]:
    return [int(number) for number in torch.as_tensor(batch).reshape(-1)]


class Watched:
    """An engine that keeps the samples of this rank, epoch by epoch, and makes updates if it is given a net."""

    def __init__(self, strategy: Any = "auto", mode: str = "train", net: nn.Module | None = None) -> None:
        self.epochs: Run = []
        optimizer = None if net is None else torch.optim.SGD(net.parameters(), lr=0.1)
        self.engine = Engine(self.step, net, optimizer=optimizer, strategy=strategy, mode=mode)

        @self.engine.on(Events.EPOCH_STARTED)
        def begin(engine: Engine, batch: Any) -> None:
            self.epochs.append([])

    def step(self, engine: Engine, batch: Any) -> None:
        self.epochs[-1].append(ids_of(batch))
        if engine.model is not None:
            engine.backward(engine.model(torch.ones(1, 1)).mean())
            engine.update()

    def run(self, data: Any, epochs: int | None = EPOCHS, **limits: Any) -> Run:
        self.engine.run(data, max_epochs=epochs, **limits)
        return self.epochs


def plain_loop(data: Any, epochs: int = EPOCHS) -> Run:
    return [[ids_of(batch) for batch in data] for _ in range(epochs)]


def flat(lists: Any) -> list[Any]:
    return list(itertools.chain.from_iterable(lists))


def joined(ranks: list[Run]) -> Run:
    """Return what all ranks see together in each step."""
    return [[flat(step) for step in zip(*epoch, strict=True)] for epoch in zip(*ranks, strict=True)]


def in_turns(ranks: list[Run]) -> Run:
    """Return the batches of all ranks in the order they were dealt in, as far as each rank has some."""
    rows = [itertools.zip_longest(*epoch) for epoch in zip(*ranks, strict=True)]
    return [[batch for row in epoch for batch in row if batch is not None] for epoch in rows]


def numbers(count: int = SAMPLES) -> Any:
    return torch.arange(count)


def seed_as_rank_0() -> None:
    for seed in (random.seed, numpy.random.seed, torch.manual_seed):
        seed(SEED_OF_RANK_0)


def seed_this_rank() -> None:
    seed_differently()
    numpy.random.seed(dist.get_rank() + SEED_OF_RANK_0)


# ---------------------------------------------------------------------- loaders


class Shuffled(Sampler[int]):
    """A sampler of the user's, which shuffles with the global generator of Python or NumPy."""

    def __init__(self, module: Any, count: int = SAMPLES) -> None:
        self.module = module
        self.count = count

    def __len__(self) -> int:
        return self.count

    def __iter__(self) -> Iterator[int]:
        order = list(range(self.count))
        self.module.shuffle(order)
        return iter(order)


class Lazy(Shuffled):
    """Draws each sample only when it is asked for it."""

    def __iter__(self) -> Iterator[int]:
        left = list(range(self.count))
        while left:
            yield left.pop(random.randrange(len(left)))


class Buckets(Sampler[list[int]]):
    """A batch sampler of the user's: neighbours stay together, and the batches are shuffled."""

    def __init__(self, batch_size: int, generator: Any) -> None:
        self.batch_size = batch_size
        self.generator = generator

    def __len__(self) -> int:
        return SAMPLES // self.batch_size

    def __iter__(self) -> Iterator[list[int]]:
        places = torch.randperm(SAMPLES // BATCH, generator=self.generator).tolist()
        order = [place * BATCH + k for place in places for k in range(BATCH)]
        return (order[begin : begin + self.batch_size] for begin in range(0, SAMPLES, self.batch_size))


def own_generator() -> torch.Generator:
    return torch.Generator().manual_seed(torch.initial_seed())  # another one on each rank


def weighted(generator: Any = None) -> WeightedRandomSampler:
    return WeightedRandomSampler(torch.arange(1.0, SAMPLES + 1), SAMPLES, generator=generator)


def workers(dataset: Any, **options: Any) -> DataLoader[Any]:
    # as torchrun's processes start them; those of the pool would take seconds for each
    warnings.filterwarnings("ignore", ".*multi-threaded, use of fork", DeprecationWarning)
    return DataLoader(dataset, num_workers=2, multiprocessing_context="fork", **options)


# how the loader of the user's script is made, for a batch size
LOADERS: dict[str, Callable[[int], DataLoader[Any]]] = {
    "in order": lambda size: DataLoader(numbers(), size),
    "shuffled": lambda size: DataLoader(numbers(), size, shuffle=True),
    "own generator": lambda size: DataLoader(numbers(), size, shuffle=True, generator=own_generator()),
    "own sampler, python": lambda size: DataLoader(numbers(), size, sampler=Shuffled(random)),
    "own sampler, numpy": lambda size: DataLoader(numbers(), size, sampler=Shuffled(numpy.random)),
    "own sampler, lazy": lambda size: DataLoader(numbers(), size, sampler=Lazy(random)),
    "weighted": lambda size: DataLoader(numbers(), size, sampler=weighted()),
    "weighted, own generator": lambda size: DataLoader(numbers(), size, sampler=weighted(own_generator())),
    "subset": lambda size: DataLoader(numbers(40), size, sampler=SubsetRandomSampler(range(8, 8 + SAMPLES))),
    "batch sampler": lambda size: DataLoader(numbers(), batch_sampler=Buckets(size, None)),
    "batch sampler, own generator": lambda size: DataLoader(numbers(), batch_sampler=Buckets(size, own_generator())),
    "workers": lambda size: workers(numbers(), batch_size=size, shuffle=True),
    "persistent workers": lambda size: workers(numbers(), batch_size=size, shuffle=True, persistent_workers=True),
    # without batches of the loader's, a sample is a batch: n times one sample
    "no batch size": lambda size: DataLoader(numbers(), size // BATCH if size > BATCH else None, shuffle=True),
}


def random_numbers() -> list[int]:
    return [int(torch.randint(10**6, ())), random.randrange(10**6), numpy.random.randint(10**6)]


def _train(names: list[str]) -> dict[str, tuple[Run, list[int]]]:
    seen: dict[str, tuple[Run, list[int]]] = {}
    for name in names:
        seed_this_rank()
        seen[name] = Watched().run(LOADERS[name](BATCH)), random_numbers()
    return seen


@pytest.mark.parametrize("world_size", [2, 3])
def test_a_step_of_n_ranks_sees_what_one_process_with_batches_n_times_as_large_sees(world_size):
    names = [name for name in LOADERS if world_size == 2 or "workers" not in name]
    ranks = run_on_ranks(_train, world_size, names)
    for name in names:
        seed_as_rank_0()
        alone = plain_loop(LOADERS[name](world_size * BATCH))
        assert joined([rank[name][0] for rank in ranks]) == alone, name
        assert (alone[0] == alone[1]) == (name == "in order"), "the order of an epoch is its own"
        # and rank 0 goes on with the random state of that process, the others with one of their own
        after = random_numbers()
        assert [rank[name][1] == after for rank in ranks] == [True] + [False] * (world_size - 1), name


class Pids(Dataset[int]):
    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> int:
        return os.getpid()


def _pids() -> set[int]:
    loader = workers(Pids(), batch_size=1, persistent_workers=True)
    trainer = Watched()
    trainer.run(loader, epochs=1)
    trainer.run(loader, epochs=3)
    return {number for epoch in trainer.epochs for batch in epoch for number in batch}


def test_persistent_workers_live_on_from_epoch_to_epoch_and_run_to_run():
    first, second = run_on_ranks(_pids, 2)
    assert len(first) == len(second) == 2 and not first & second


def _drawn_while_the_step_draws_too() -> Run:
    seed_this_rank()
    watched = Watched()

    @watched.engine.on(Events.ITERATION_STARTED)
    def draw(engine: Engine, batch: Any) -> None:
        random.random()

    return watched.run(DataLoader(numbers(400), batch_size=1, sampler=Lazy(random, 400)))


def test_an_order_that_is_drawn_sample_by_sample_is_the_same_on_all_ranks_whatever_they_draw_meanwhile():
    for epoch in in_turns(run_on_ranks(_drawn_while_the_step_draws_too, 2)):
        assert sorted(epoch) == [[number] for number in range(400)] != epoch


# ---------------------------------------------------------------------- streams, lists, iterators


class Stream(IterableDataset[int]):
    """Numbers that its workers share out among themselves, as torch's documentation says."""

    def __init__(self, count: int) -> None:
        self.count = count

    def __iter__(self) -> Iterator[int]:
        worker = get_worker_info()
        begin, step = (0, 1) if worker is None else (worker.id, worker.num_workers)
        return iter(range(begin, self.count, step))


class Endless(Sampler[int]):
    """Has neither a length nor an end."""

    def __iter__(self) -> Iterator[int]:
        while True:
            yield int(torch.randint(SAMPLES, ()))


class Unsized:
    """What can be iterated again and again, and does not say how long it is."""

    def __init__(self, batches: Any) -> None:
        self.batches = batches

    def __iter__(self) -> Iterator[Any]:
        return iter(self.batches)


ITERABLES: dict[str, Callable[[int], Any]] = {
    "list": lambda batches: list(torch.arange(batches)),
    "tuple": lambda batches: tuple(range(batches)),
    "range": lambda batches: range(batches),
    "without a length": lambda batches: Unsized(range(batches)),
    "data set": lambda batches: DataLoader(Stream(2 * batches), batch_size=2),
    "data set, no batch size": lambda batches: DataLoader(Stream(batches), batch_size=None),
    "data set, workers": lambda batches: workers(Stream(2 * batches), batch_size=2),
    "data set, persistent workers": lambda batches: workers(Stream(2 * batches), batch_size=2, persistent_workers=True),
}


def _iterate(batches: int) -> dict[str, tuple[Run, Run]]:
    return {
        name: (Watched().run(make(batches)), Watched(mode="eval").run(make(batches), epochs=1))
        for name, make in ITERABLES.items()
    }


@pytest.mark.parametrize(("batches", "world_size"), [(6, 2), (7, 3)])
def test_each_rank_takes_its_turns_in_what_has_no_order_to_agree_on(batches, world_size):
    ranks = run_on_ranks(_iterate, world_size, batches)
    for name, make in ITERABLES.items():
        alone = plain_loop(make(batches))
        trained, evaluated = (in_turns([rank[name][mode] for rank in ranks]) for mode in (0, 1))
        assert trained == [epoch[: batches - batches % world_size] for epoch in alone], name
        assert evaluated == alone[:1], name


def _one_shot() -> dict[str, Run]:
    trainer, evaluator, asked = Watched(), Watched(mode="eval"), Watched()
    return {
        "generator": trainer.run((number for number in range(6)), epochs=1),
        "iterator, evaluated": evaluator.run(iter(range(5)), epochs=1),
        "another in each epoch": asked.run(lambda state: (10 * state.epoch + number for number in range(4))),
        "endless, in epochs of three": Watched().run(itertools.count(), epoch_length=3),
    }


def test_iterators_that_can_be_gone_through_once():
    first, second = run_on_ranks(_one_shot, 2)
    seen = {name: [flat(epoch) for epoch in in_turns([first[name], second[name]])] for name in first}
    assert seen == {
        "generator": [[0, 1, 2, 3, 4, 5]],
        "iterator, evaluated": [[0, 1, 2, 3, 4]],
        "another in each epoch": [[10, 11, 12, 13], [20, 21, 22, 23]],
        "endless, in epochs of three": [[0, 1, 2, 3, 4, 5], [6, 7, 8, 9, 10, 11]],
    }


def _in_epochs_of_four() -> list[Run]:
    runs = []
    for loader in (DataLoader(numbers(), BATCH, shuffle=True), DataLoader(numbers(), BATCH, sampler=Endless())):
        seed_this_rank()
        runs.append(Watched().run(loader, epochs=3, epoch_length=4))
    return runs


def test_with_an_epoch_length_the_order_goes_on_over_the_borders_of_epochs_even_without_an_end():
    shuffled, endless = (joined(list(ranks)) for ranks in zip(*run_on_ranks(_in_epochs_of_four, 2), strict=True))
    seed_as_rank_0()
    first, second = plain_loop(DataLoader(numbers(), 2 * BATCH, shuffle=True))  # of six steps each
    assert shuffled == [first[:4], first[4:] + second[:2], second[2:]]
    seed_as_rank_0()
    alone = list(itertools.islice(DataLoader(numbers(), 2 * BATCH, sampler=Endless()), 12))
    assert flat(endless) == [ids_of(batch) for batch in alone]


# ---------------------------------------------------------------------- batches that do not go round


class Unannounced(Shuffled):
    __len__ = None  # type: ignore[assignment]


UNEVEN: dict[str, Callable[[int], Any]] = {
    "shuffled": lambda samples: DataLoader(numbers(samples), BATCH, shuffle=True),
    "without a length": lambda samples: DataLoader(numbers(samples), BATCH, sampler=Unannounced(random, samples)),
    "list": lambda samples: list(numbers(samples).split(BATCH)),
}


@contextmanager
def listening() -> Iterator[list[str]]:
    """Give the list of what the engine says in the log meanwhile."""
    told: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: told.append(f"{record.levelname}: {record.getMessage()}")  # type: ignore[method-assign]
    logger = logging.getLogger("pellucid.engine")
    logger.addHandler(handler)
    try:
        yield told
    finally:
        logger.removeHandler(handler)


def _uneven(uneven: Any, samples: int) -> dict[str, tuple[Run, int, list[str]]]:
    seen = {}
    for name, make in UNEVEN.items():
        watched = Watched(DDP(uneven=uneven), net=nn.Linear(1, 1))
        seed_this_rank()
        data = make(samples)
        with listening() as told:
            watched.run(data, epochs=1)
            watched.run(data, epochs=2)
        seen[name] = watched.epochs, watched.engine.state.updates, told
    return seen


@pytest.mark.parametrize(("samples", "world_size"), [(9, 2), (10, 3)])
def test_by_default_batches_that_do_not_go_round_are_left_out_and_one_rank_says_so_once(samples, world_size):
    ranks = run_on_ranks(_uneven, world_size, "trim", samples)
    each, left = divmod(5, world_size)
    for name, make in UNEVEN.items():
        seed_as_rank_0()
        runs, updates, told = zip(*[rank[name] for rank in ranks], strict=True)
        assert in_turns(runs) == [epoch[: 5 - left] for epoch in plain_loop(make(samples))], name
        assert updates == (2 * each,) * world_size
        assert told == (
            [
                f"WARNING: 5 batches do not divide by {world_size} ranks: each rank takes {each}, and {left} of every "
                'epoch are left out. To repeat batches instead: uneven="pad" of the strategy'
            ],
            *[[]] * (world_size - 1),
        )


@pytest.mark.parametrize(("samples", "world_size"), [(9, 2), (8, 3), (2, 3)])
def test_padding_repeats_batches_from_the_beginning_of_the_order_so_that_all_ranks_make_as_many_updates(
    samples, world_size
):
    ranks = run_on_ranks(_uneven, world_size, "pad", samples)
    for name, make in UNEVEN.items():
        seed_as_rank_0()
        runs, updates, told = zip(*[rank[name] for rank in ranks], strict=True)
        alone = plain_loop(make(samples))
        each = -(-len(alone[0]) // world_size)
        padded = [list(itertools.islice(itertools.cycle(epoch), each * world_size)) for epoch in alone]
        assert in_turns(runs) == padded, name
        assert updates == (2 * each,) * world_size
        assert told == ([],) * world_size


def _evaluate(samples: int) -> dict[str, Run]:
    """Return, on all ranks, the batches in the order of the data: of an evaluation after a training on the same."""
    seen = {}
    kinds = UNEVEN | {"persistent workers": lambda samples: workers(numbers(samples), persistent_workers=True)}
    for name, make in kinds.items():
        data = make(samples)
        trainer, evaluator = Watched(DDP(uneven="pad")), None
        evaluator = Watched(trainer.engine.strategy, mode="eval")
        trainer.run(data, epochs=1)
        seed_this_rank()
        evaluator.run(data, epochs=1)
        evaluator.run(data, epochs=1)
        seen[name] = [evaluator.engine.strategy.gather_batches(epoch) for epoch in evaluator.epochs]
    return seen


@pytest.mark.parametrize(("samples", "world_size"), [(1, 2), (9, 2), (10, 3)])
def test_an_evaluation_sees_every_sample_once_on_data_that_a_training_pads(samples, world_size):
    ranks = run_on_ranks(_evaluate, world_size, samples)
    for name, make in UNEVEN.items():
        seed_as_rank_0()
        assert [rank[name] for rank in ranks] == [plain_loop(make(samples))] * world_size, name
    assert ranks[0]["persistent workers"] == [[[number] for number in range(samples)]] * 2


# ---------------------------------------------------------------------- samplers that divide the data themselves


class Strided(Sampler[int]):
    """A sampler of the user's that divides the data, and shuffles by the number of the epoch it is told."""

    def __init__(self, rank: int, world_size: int) -> None:
        self.rank = rank
        self.world_size = world_size
        self.epoch = 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __len__(self) -> int:
        return len(range(self.rank, SAMPLES, self.world_size))

    def __iter__(self) -> Iterator[int]:
        order = random.Random(self.epoch).sample(range(SAMPLES), SAMPLES)
        return iter(order[self.rank :: self.world_size])


def distributed(rank: int, samples: int = SAMPLES, world_size: int = 2) -> DistributedSampler[int]:
    return DistributedSampler(numbers(samples), world_size, rank)


DIVIDED: dict[str, Callable[[int], DataLoader[Any]]] = {
    "sampler": lambda rank: DataLoader(numbers(), BATCH, sampler=distributed(rank)),
    "of the user": lambda rank: DataLoader(numbers(), BATCH, sampler=Strided(rank, 2)),
    "in a batch sampler": lambda rank: DataLoader(
        numbers(), batch_sampler=BatchSampler(distributed(rank), BATCH, False)
    ),
    "no batch size": lambda rank: DataLoader(numbers(), None, sampler=distributed(rank)),
    "persistent workers": lambda rank: workers(numbers(), sampler=distributed(rank), persistent_workers=True),
}


def _divided() -> dict[str, Run]:
    return {name: Watched().run(make(dist.get_rank()), epochs=3) for name, make in DIVIDED.items()}


def with_set_epoch(loader: DataLoader[Any]) -> Run:
    """Return three epochs of a plain loop as torch's documentation has it."""
    sampler: Any = getattr(loader.batch_sampler, "sampler", loader.sampler)
    epochs: Run = []
    for epoch in range(3):
        sampler.set_epoch(epoch)
        epochs += plain_loop(loader, 1)
    return epochs


def test_a_distributed_sampler_is_left_alone_and_told_the_epoch_as_in_a_plain_loop():
    for rank, seen in enumerate(run_on_ranks(_divided, 2)):
        for name, make in DIVIDED.items():
            assert seen[name] == with_set_epoch(make(rank)), name
            assert seen[name][0] != seen[name][1] != seen[name][2]


def _evaluate_divided() -> tuple[Run, list[str]]:
    with listening() as told:
        watched = Watched(mode="eval")
        loader = DataLoader(numbers(5), 2, sampler=DistributedSampler(numbers(5), shuffle=False))
        for _ in range(2):
            watched.run(loader, epochs=1)
    return watched.epochs, told


def test_an_evaluation_over_a_distributed_sampler_says_once_that_it_counts_samples_twice():
    (first, told), (second, not_told) = run_on_ranks(_evaluate_divided, 2)
    assert first == [[[0, 2], [4]]] * 2 and second == [[[1, 3], [0]]] * 2
    assert len(told) == 1 and "DistributedSampler counts 1 sample(s) twice" in told[0] and not not_told


def _parts() -> tuple[Run, list[str]]:
    mine = [[10 * dist.get_rank() + number] for number in range(4 - dist.get_rank())]
    with listening() as told:
        return Watched().run(already_sharded(mine)), told


def test_parts_that_are_declared_are_read_as_they_are_and_one_rank_says_what_is_left_out():
    (first, told), (second, not_told) = run_on_ranks(_parts, 2)
    assert first == [[[0], [1], [2]]] * 2 and second == [[[10], [11], [12]]] * 2
    assert len(told) == 1 and "the ranks have 4, 3 batches (rank 0 first): each takes 3" in told[0] and not not_told


# ---------------------------------------------------------------------- data that is refused


class OwnSeed(Sampler[int]):
    """Shuffles differently on each rank, from a generator that nobody can find."""

    def __len__(self) -> int:
        return SAMPLES

    def __iter__(self) -> Iterator[int]:
        return iter(random.Random(dist.get_rank()).sample(range(SAMPLES), SAMPLES))


# what each rank gives, how the engine runs, and what each is told
REFUSED: dict[str, tuple[Callable[[int], Any], str, str]] = {
    "one batch": (lambda rank: DataLoader(numbers(2), BATCH), "train", r"1 batch\(es\), too few to train on 2 ranks"),
    "a list of one batch": (lambda rank: [numbers(2)], "train", r"1 batch\(es\), too few to train on 2 ranks"),
    "an order of one batch": (
        lambda rank: DataLoader(numbers(1), sampler=Unannounced(random, 1)),
        "train",
        r"1 batch\(es\), too few to train on 2 ranks",
    ),
    "a part without a batch": (
        lambda rank: already_sharded([numbers(2)] * rank),
        "train",
        "0, 1 batches.*without a batch cannot train",
    ),
    "lengths": (lambda rank: DataLoader(numbers(8 + rank), BATCH), "train", "different lengths, 4 to 5 batches"),
    "lengths of lists": (lambda rank: [1, 2, 3][rank:], "train", "different lengths, 2 to 3 batches"),
    "lengths, evaluated": (lambda rank: [1, 2, 3][rank:], "eval", "different lengths, 2 to 3 batches"),
    "a length and none": (
        lambda rank: DataLoader(numbers(), sampler=Unannounced(random) if rank else Shuffled(random)),
        "train",
        "different lengths",
    ),
    "kinds": (lambda rank: [1, 2] if rank else DataLoader(numbers(2)), "train", "different kinds: order and items"),
    "kinds, evaluated": (lambda rank: Stream(4) if rank else [1, 2, 3, 4], "eval", "different kinds: items and stream"),
    "declared on one rank": (
        lambda rank: already_sharded([1, 2]) if rank else [1, 2],
        "train",
        "different kinds: items and part",
    ),
    "orders": (lambda rank: DataLoader(numbers(), sampler=OwnSeed()), "train", "different orders.*already_sharded"),
    "samplers for three": (
        lambda rank: DataLoader(numbers(), sampler=distributed(rank, world_size=3)),
        "train",
        "divides the data into 3 parts, and 2 ranks",
    ),
    "samplers for one rank": (
        lambda rank: DataLoader(numbers(), sampler=distributed(0)),
        "eval",
        "is made for rank=0, and this is rank 1|sampler of another rank",
    ),
}


def _refused() -> dict[str, str]:
    told = {}
    for name, (make, mode, _) in REFUSED.items():
        watched = Watched(mode=mode)
        with pytest.raises(DataError) as error:
            watched.run(make(dist.get_rank()))
        assert not any(watched.epochs), name
        told[name] = str(error.value)
    return told


def test_data_that_cannot_be_divided_is_a_clear_error_on_all_ranks():
    for told in run_on_ranks(_refused, 2):
        for name, (_, _, text) in REFUSED.items():
            assert re.search(text, told[name]), (name, told[name])


# ---------------------------------------------------------------------- a run that is stopped and taken up again

GIVEN: dict[str, Callable[[int], Any]] = {
    **{name: lambda rank, make=make: make(BATCH) for name, make in LOADERS.items()},
    **{name: lambda rank, make=make: make(12) for name, make in ITERABLES.items()},
    **DIVIDED,
    "iterator": lambda rank: iter(range(24)),
    "generator": lambda rank: (number for number in range(24)),
    "callable": lambda rank: lambda state: (100 * state.epoch + number for number in range(12)),
    "part": lambda rank: already_sharded([100 * rank + number for number in range(6)]),
}


def _run(name: str, ask_at: tuple[int, ...]) -> tuple[Run, list[int]]:
    seed_this_rank()
    data, watched = GIVEN[name](dist.get_rank()), Watched()
    limits = {"epoch_length": 6} if isinstance(data, Iterator) else {}

    @watched.engine.on(Events.ITERATION_COMPLETED)
    def ask(engine: Engine, batch: Any) -> None:
        random_numbers()
        if engine.state.iteration in ask_at and engine.state.rank == 1:
            engine.terminate()

    ends = []
    for _ in range(len(ask_at) + 1):
        watched.run(data, **limits)
        ends.append(watched.engine.state.iteration)
    return watched.epochs, ends


def _cut() -> dict[str, Any]:
    return {name: (_run(name, ()), _run(name, (2, 8))) for name in GIVEN}


def test_a_run_that_is_taken_up_again_in_the_same_objects_sees_exactly_the_remaining_samples():
    for rank in run_on_ranks(_cut, 2):
        for name, ((whole, end), (seen, ends)) in rank.items():
            first, second, last = ends
            assert 0 < first < 6 < second < last and [last] == end, (name, ends)
            assert seen == whole, name
