"""GPyTorch: deep kernel learning, a network before the kernel of a Gaussian process."""

from pathlib import Path

import torch

from tests.clients.models import mlp, rows
from tests.clients.watch import Watch


def deep_kernel(watch: Watch, folder: Path) -> None:
    import gpytorch

    x, _ = rows()
    y = x[:, 0].sin()
    likelihood = gpytorch.likelihoods.GaussianLikelihood()

    class Deep(gpytorch.models.ExactGP):
        def __init__(self) -> None:
            super().__init__(x, y, likelihood)
            self.features = watch.convert(mlp())
            self.mean = gpytorch.means.ConstantMean()
            self.kernel = gpytorch.kernels.ScaleKernel(gpytorch.kernels.RBFKernel())

        def forward(self, x: torch.Tensor) -> gpytorch.distributions.MultivariateNormal:
            features = self.features(x)
            return gpytorch.distributions.MultivariateNormal(self.mean(features), self.kernel(features))

    model = Deep().train()
    objective = gpytorch.mlls.ExactMarginalLogLikelihood(likelihood.train(), model)
    watch.fit(torch.optim.AdamW(model.parameters(), lr=1e-2), lambda: -objective(model(x), y), 6)
    with torch.no_grad():
        assert likelihood.eval()(model.eval()(x)).mean.isfinite().all()


RUNS = {"deep kernel learning": deep_kernel}
