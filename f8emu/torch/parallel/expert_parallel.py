"""Expert parallelism: every rank holds some of the experts, and tokens travel to their experts and back.

    rank's tokens, by expert  ->  all-to-all  ->  rows of this rank's experts  ->  all-to-all  ->  output of its tokens

The rows of an expert are those of the first rank, then those of the second, and so on. Tokens travel in high precision:
their column scales are of all rows of an expert, so codes that a sender casts are half of what the expert needs.
"""

from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Shard, distribute_tensor
from torch.distributed.tensor.parallel import ParallelStyle
from torch.nn.functional import pad

from f8emu.spec.errors import OperandError
from f8emu.torch.layer.experts import Float8Experts
from f8emu.torch.torch_internals import Function, collective, not_compiled, own_parameters, to_list


class Route(NamedTuple):
    """The way of a rank's tokens, sorted by expert, to the experts of all ranks."""

    group: str
    rows: int  # on this rank, those behind the last group included
    sent: list[int]  # rows to each rank
    received: list[int]  # rows from each rank
    order: Tensor  # of the rows that arrive: by expert
    inverse: Tensor

    def there(self, x: Tensor) -> Tensor:
        """The rows of this rank's experts, from those of its tokens; if there is none, one behind the last group."""
        x = x[: sum(self.sent)]
        rows = collective("all_to_all_single", x, self.received, self.sent, self.group).index_select(0, self.order)
        return rows if self.order.shape[0] else x.new_zeros(1, x.shape[1])

    def back(self, y: Tensor) -> Tensor:
        """The rows of this rank's tokens, from those of its experts; zeros behind the last group."""
        y = y.index_select(0, self.inverse)
        rows = collective("all_to_all_single", y, self.sent, self.received, self.group)
        return pad(rows, (0, 0, 0, self.rows - rows.shape[0]))


class _Travel(Function):
    # `Route.there` and `Route.back`, each the gradient of the other.

    @staticmethod
    def forward(ctx: Any, x: Tensor, route: Route, is_back: bool) -> Tensor:
        ctx.route, ctx.is_back = route, is_back
        return route.back(x) if is_back else route.there(x)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        return _Travel.apply(grads[0], ctx.route, not ctx.is_back), None, None


@not_compiled  # the host waits for the sizes
def find_route(offs: Tensor, rows: int, mesh: DeviceMesh) -> tuple[Route, Tensor]:
    """The route of a call with `rows` tokens whose groups, one of each expert of all ranks, end at `offs`.

    Also the ends of the groups of this rank's experts, int32 [experts / ranks].
    """
    group, ranks = mesh.get_group().group_name, mesh.size()
    experts_here = offs.shape[0] // ranks
    # 1. How many rows each rank sends to each expert: those of this rank to all, those of all ranks to its own.
    sizes = offs.diff(prepend=offs.new_zeros(1))
    arriving = collective("all_to_all_single", sizes, [experts_here] * ranks, [experts_here] * ranks, group)
    sent, received = to_list(torch.stack([sizes, arriving]).view(2, ranks, experts_here).sum(dim=2))
    # 2. They arrive rank by rank, and are sorted by expert.
    experts = torch.arange(experts_here, device=offs.device).repeat(ranks)
    order = experts.repeat_interleave(arriving, output_size=sum(received)).argsort(stable=True)
    inverse = torch.empty_like(order)
    inverse[order] = torch.arange(sum(received), device=offs.device)
    ends = arriving.view(ranks, experts_here).sum(dim=0).cumsum(0).to(torch.int32)
    return Route(group, rows, sent, received, order, inverse), ends


class ExpertParallel(ParallelStyle):
    """A style of `parallelize_module` that spreads the experts of a `Float8Experts` over the ranks of a mesh.

    The weights become DTensors with Shard(0): rank r of R has the experts from r * E / R on. Every rank calls the
    module with its own tokens, and `offs` of all experts. Two all-to-alls in each pass exchange tokens in the dtype of
    the input; the host waits for the number of tokens of each rank. FSDP2 can shard the weights over another dimension
    of the mesh.

    Shapes:
        input [T, D], sorted by expert, any T on each rank; offs int32 [E], of all experts -> [T, D].

    Exactness: outputs, input gradients and the gradients of each expert's weights are those of one device with all
    tokens, the rows of an expert in the order of the ranks.

    Raises:
        OperandError: another module; experts that the ranks cannot share evenly; at a call, offs of other experts.
    """

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        # 1. This rank's experts.
        if not isinstance(module, Float8Experts):
            raise OperandError(
                f"ExpertParallel: the module must be a Float8Experts; got {type(module).__name__}; for converted "
                "experts use the expert parallelism of their library"
            )
        experts = module.gate_up_proj.shape[0]
        if experts % device_mesh.size():
            raise OperandError(
                f"ExpertParallel: the number of experts must be a multiple of that of ranks; got {experts} experts and "
                f"{device_mesh.size()} ranks; choose a smaller mesh"
            )
        for name, weight in own_parameters(module).items():
            assert weight is not None, "such a module has all of its weights"
            shard = distribute_tensor(weight.detach(), device_mesh, [Shard(0)])
            setattr(module, name, nn.Parameter(shard, weight.requires_grad))
        # 2. Their tokens: the route of a call is known from its beginning to its end.
        routes: list[Route] = []

        def dispatch(
            _: nn.Module, args: tuple[Any, ...], named: dict[str, Any]
        ) -> tuple[tuple[Any, ...], dict[str, Any]]:
            input, offs = _arguments(*args, **named)
            if offs.shape != (experts,) or offs.dtype is not torch.int32:
                raise OperandError(
                    f"ExpertParallel: offs must be int32 [{experts}], the end of the rows of each expert of all ranks; "
                    f"got {offs.dtype} {list(offs.shape)}; take sizes.cumsum(0).to(torch.int32)"
                )
            route, ends = find_route(offs, input.shape[0], device_mesh)
            routes[:] = [route]
            return (_Travel.apply(input, route, False), ends), {}

        def combine(_: nn.Module, args: Any, output: Tensor) -> Tensor:
            return _Travel.apply(output, routes.pop(), True)

        module.register_forward_pre_hook(not_compiled(dispatch), with_kwargs=True)
        module.register_forward_hook(not_compiled(combine))
        return module


def _arguments(input: Tensor, offs: Tensor) -> tuple[Tensor, Tensor]:
    return input, offs
