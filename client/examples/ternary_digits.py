"""A classifier of scikit-learn's digits with ternary weights and activations, beside float32.

Both have one hidden layer of the same width. The ternary one is trained with latent weights, then
kept as two bit planes a layer, saved and loaded; its products are exact integers.
"""

import tempfile
from pathlib import Path

import torch
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split
from storm_kernels.ternary.nn import SimpleRotorNet
from torch import nn

INPUTS, HIDDEN, OUTPUTS, EPOCHS = 64, 1024, 10, 60


def digits():
    x, y = load_digits(return_X_y=True)
    return train_test_split(x.astype("float32"), y, test_size=0.25, random_state=0, stratify=y)


def train_float(x, y):
    torch.manual_seed(0)
    x, y = torch.from_numpy(x), torch.from_numpy(y)
    norm, *layers = nn.BatchNorm1d(INPUTS), nn.Linear(INPUTS, HIDDEN), nn.Linear(HIDDEN, OUTPUTS)
    model = nn.Sequential(norm, layers[0], nn.ReLU(), layers[1])
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=1e-2)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, EPOCHS)
    for _ in range(EPOCHS):
        for part in torch.randperm(len(x)).split(64):
            loss = nn.functional.cross_entropy(model(x[part]), y[part])
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        schedule.step()
    return model.eval()


def main():
    x_train, x_test, y_train, y_test = digits()
    model = train_float(x_train, y_train)
    dense = sum(tensor.nbytes for tensor in model.state_dict().values())
    guesses = model(torch.from_numpy(x_test)).argmax(1).numpy()
    print(f"float32: {(guesses == y_test).mean():.2%} right, {dense:,} bytes")

    net = SimpleRotorNet(INPUTS, HIDDEN, OUTPUTS)
    net.train(x_train, y_train, epochs=EPOCHS)
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "digits.npz"
        net.save(file)
        net = SimpleRotorNet.load(file)
    guesses = net.forward(x_test).argmax(1)
    print(f"ternary: {(guesses == y_test).mean():.2%} right, {net.nbytes:,} bytes")


if __name__ == "__main__":
    main()
