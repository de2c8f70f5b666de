"""PyTorch Geometric: layers on graphs. Its own Linear is no nn.Linear."""

from pathlib import Path

import torch

from tests.clients.watch import Watch

REMARK = "`torch_geometric.nn.Linear` is no `nn.Linear`: layers that hold it (`GCNConv`, `GATConv`) stay as they are."


def graph(watch: Watch, folder: Path) -> None:
    from torch_geometric.data import Data
    from torch_geometric.nn import GINConv, global_mean_pool

    torch.manual_seed(0)
    data = Data(torch.randn(24, 32), torch.randint(0, 24, (2, 96)), batch=torch.arange(24) // 6)
    labels = torch.arange(4)

    class Net(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            inner = torch.nn.Sequential(torch.nn.Linear(32, 32), torch.nn.ReLU(), torch.nn.Linear(32, 32))
            self.convolution, self.head = GINConv(inner, train_eps=True), torch.nn.Linear(32, 16)

        def forward(self, data: Data) -> torch.Tensor:
            return self.head(global_mean_pool(self.convolution(data.x, data.edge_index).relu(), data.batch))

    model = watch.convert(Net())
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    watch.fit(optimizer, lambda: torch.nn.functional.cross_entropy(model(data), labels))


RUNS = {"`GINConv`, `global_mean_pool`": graph}
