"""Two students, each a process, learn from one frozen teacher whose outputs they share.

Whoever needs an output first computes it and puts it into the daemon's cache; the other gets it.
With a daemon running (`stormd serve`) they use that one, and later runs find the outputs too.
"""

import multiprocessing

import storm_client as storm
import torch
from torch import nn

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
STUDENTS, EPOCHS, BATCHES, ROWS, WIDTH = 2, 3, 8, 128, 512


def mlp(hidden, layers):
    inner = [m for _ in range(layers) for m in (nn.Linear(hidden, hidden), nn.GELU())]
    return nn.Sequential(nn.Linear(WIDTH, hidden), nn.GELU(), *inner, nn.Linear(hidden, WIDTH))


def teach(cache, teacher, number, x):
    """Return the teacher's output for a batch, and whether it was there."""
    name = f"frozen teacher, {ROWS}x{WIDTH}, batch {number}"  # all that the output depends on
    output = cache.get(name, device=DEVICE)
    if output is not None:
        return output, True
    with torch.no_grad():
        output = teacher(x)
    cache.put(name, output, ttl=3600)
    return output, False


def train(address, student):
    torch.manual_seed(0)
    teacher = mlp(1024, layers=4).to(DEVICE)
    batches = torch.randn(BATCHES, ROWS, WIDTH)
    torch.manual_seed(1 + student)
    model = mlp(128, layers=1).to(DEVICE)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    found = 0
    with storm.connect(address) as client:
        for _ in range(EPOCHS):
            for number in torch.randperm(BATCHES).tolist():
                x = batches[number].to(DEVICE)
                target, was_there = teach(client.cache, teacher, number, x)
                found += was_there
                loss = nn.functional.mse_loss(model(x), target)
                loss.backward()
                optimizer.step()
                optimizer.zero_grad()
    total = EPOCHS * BATCHES
    print(f"student {student}: loss {loss.item():.6f}, {found} of {total} outputs were there")


def main():
    with storm.connect() as client:
        processes = multiprocessing.get_context("spawn")
        students = [
            processes.Process(target=train, args=(client.address, student))
            for student in range(STUDENTS)
        ]
        for student in students:
            student.start()
        for student in students:
            student.join()
        if any(student.exitcode for student in students):
            raise SystemExit("a student failed")
        cache = client.status().cache
        print(f"cache: {cache.items} tensors in {cache.used_bytes / 2**20:.1f} MiB")


if __name__ == "__main__":
    main()
