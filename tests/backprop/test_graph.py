from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from quire.backprop import computational_graph
from quire.errors import InputError


def test_a_case_solved_by_hand() -> None:
    """(x·w + 1)² at x = 2, w = 3: 7² = 49, with gradients 14, 14·w = 42 and 14·x = 28."""
    graph = computational_graph(
        lambda x, w: (x * w + 1) ** 2, torch.tensor(2.0), torch.tensor(3.0), names=("x", "w")
    )
    assert [node.op for node in graph.nodes] == ["input", "input", "×", "+", "pow"]
    assert [node.value.item() for node in graph.nodes] == [2, 3, 6, 7, 49]
    gradients = [node.gradient.item() for node in graph.nodes if node.gradient is not None]
    assert gradients == [42, 28, 14, 14, 1]
    assert graph.edges == [(0, 2), (1, 2), (2, 3), (3, 4)]
    assert graph["w"].label() == "w (input)\n3\n∇ 28"
    assert graph.output.label() == "pow (2)\n49\n∇ 1"


def test_gradients_equal_autograd_at_every_parameter() -> None:
    model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.GELU(), nn.Linear(4, 2)).double()
    x = torch.randn(5, 3, dtype=torch.float64)
    graph = computational_graph(model, x)
    assert all(parameter.grad is None for parameter in model.parameters())
    expected = torch.autograd.grad(model(x).sum(), list(model.parameters()))
    for (name, _), gradient in zip(model.named_parameters(), expected, strict=True):
        actual = graph[name].gradient
        assert actual is not None
        torch.testing.assert_close(actual, gradient)
    torch.testing.assert_close(graph.output.value, model(x).detach())
    assert {"linear", "batch_norm", "gelu"} <= {node.op for node in graph.nodes}


def test_gradients_of_inner_nodes_are_those_of_the_rest_of_the_computation() -> None:
    x = torch.randn(4, dtype=torch.float64)
    graph = computational_graph(lambda x: (torch.tanh(x) * torch.sin(x)).sum(), x)
    node = {node.op: node for node in graph.nodes}
    torch.testing.assert_close(node["tanh"].gradient, torch.sin(x))
    torch.testing.assert_close(node["sin"].gradient, torch.tanh(x))


def test_operations_in_place_make_nodes_of_their_own() -> None:
    def function(x: Tensor) -> Tensor:
        y = x * 2
        y.exp_()
        return y * y

    graph = computational_graph(function, torch.tensor(0.5, dtype=torch.float64))
    assert [node.op for node in graph.nodes] == ["input", "×", "exp", "×"]
    e = torch.e
    values = [node.value.item() for node in graph.nodes]
    assert values == pytest.approx([0.5, 1, e, e**2])
    gradients = [node.gradient.item() for node in graph.nodes if node.gradient is not None]
    assert gradients == pytest.approx([4 * e**2, 2 * e**2, 2 * e, 1])


def test_only_what_the_output_depends_on_is_shown() -> None:
    def function(x: Tensor) -> Tensor:
        _ = torch.cos(x)
        parts = x.chunk(2)
        return parts[0] + torch.ones(1) * parts[1].detach()

    graph = computational_graph(function, torch.tensor([1.0, 2.0]))
    assert "cos" not in {node.op for node in graph.nodes}
    detached = next(node for node in graph.nodes if node.op == "detach")
    assert detached.gradient is None
    assert graph["x1"].gradient is not None
    assert graph["x1"].gradient.tolist() == [1, 0]


def test_works_on_attention_recurrence_and_integers() -> None:
    layer = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True)
    assert computational_graph(layer, torch.randn(1, 3, 8)).output.gradient is not None
    rnn = nn.LSTM(2, 3)
    assert computational_graph(lambda x: rnn(x)[0], torch.randn(4, 1, 2)).output.value.shape == (4, 1, 3)
    graph = computational_graph(nn.Embedding(5, 2), torch.tensor([1, 3]))
    assert graph["x1"].gradient is None
    assert graph["weight"].gradient is not None
    assert graph["weight"].gradient.sum(1).tolist() == [0, 2, 0, 2, 0]


def test_dot_names_every_node_and_edge() -> None:
    graph = computational_graph(lambda x: (x * x).sum(), torch.tensor([1.0, 2.0]), names=['say "x"'])
    dot = graph.to_dot()
    assert dot.startswith("digraph {")
    assert 'label="say \\"x\\" (input)\\n[1, 2]\\n∇ [2, 4]"' in dot
    assert "n0 -> n1;" in dot
    assert "n1 -> n2;" in dot


def test_layers_run_downwards_and_the_picture_shows_every_label() -> None:
    model = nn.Sequential(nn.Linear(2, 3), nn.ReLU(), nn.Linear(3, 1))
    graph = computational_graph(model, torch.randn(4, 2))
    depth = {node.index: row for row, layer in enumerate(graph.layers()) for node in layer}
    assert len(depth) == len(graph.nodes)
    assert all(depth[source] < depth[target] for source, target in graph.edges)
    axes = graph.figure().axes[0]
    shown = {text.get_text() for text in axes.texts}
    assert {node.label() for node in graph.nodes} <= shown
    assert "gradients" in axes.get_title()


def test_errors_say_what_to_do() -> None:
    with pytest.raises(InputError, match=r"returned a tuple(.|\n)*fix: wrap it"):
        computational_graph(lambda x: (x, x), torch.ones(1))
    with pytest.raises(InputError, match="2 names for 1 inputs"):
        computational_graph(torch.sin, torch.ones(1), names=("a", "b"))
