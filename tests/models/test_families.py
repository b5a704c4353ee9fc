"""What is particular to one family of convolutional networks, by hand or by explicit loops."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from quire import models
from quire.errors import InputError
from quire.models.densenet import DenseBlock
from quire.models.googlenet import Inception
from quire.models.lenet import Enlarge
from quire.models.resnet import BasicBlock, Bottleneck, PadChannels

pytestmark = pytest.mark.slow

# LeNet ----------------------------------------------------------------------------------------


def test_lenet_layer_by_layer() -> None:
    net, x = models.lenet5().double().eval(), torch.randn(2, 1, 32, 32).double()
    c1 = functional.conv2d(x, net.c1.weight, net.c1.bias)
    s2 = functional.max_pool2d(c1.relu(), 2)
    c3 = functional.conv2d(s2, net.c3.weight, net.c3.bias)
    s4 = functional.max_pool2d(c3.relu(), 2)
    assert [tuple(map.shape[1:]) for map in (c1, s2, c3, s4)] == [
        (6, 28, 28), (6, 14, 14), (16, 10, 10), (16, 5, 5)
    ]  # fmt: skip
    # C5 as the paper has it: a convolution whose 5×5 window is the whole map.
    c5 = functional.conv2d(s4, net.c5.weight.reshape(120, 16, 5, 5), net.c5.bias).flatten(1)
    f6 = c5.relu() @ net.f6.weight.T + net.f6.bias
    torch.testing.assert_close(net(x), f6.relu() @ net.output.weight.T + net.output.bias)
    maps = net.stages(x)
    for stage, expected in zip(maps, (c1.relu(), c3.relu(), s4), strict=True):
        torch.testing.assert_close(stage, expected)


def test_lenet_repeats_the_border_of_smaller_images() -> None:
    net, x = models.lenet5().eval(), torch.randn(2, 1, 28, 21)
    rows, columns = torch.arange(32).sub(2).clamp(0, 27), torch.arange(32).sub(5).clamp(0, 20)
    enlarged = x[:, :, rows][..., columns]
    assert torch.equal(Enlarge(32)(x), enlarged)
    assert torch.equal(net(x), net(enlarged))
    with pytest.raises(InputError, match=r"(?s)33×32 pixels.*at most 32×32"):
        net(torch.zeros(1, 1, 33, 32))


# GoogLeNet ------------------------------------------------------------------------------------


def test_an_inception_block_by_hand() -> None:
    block, x = Inception(5, 2, 3, 4, 6, 7, 1).double().eval(), torch.randn(2, 5, 6, 7).double()

    def apply(layer: nn.Module, x: Tensor) -> Tensor:
        padded = functional.pad(x, [layer.conv.weight.shape[-1] // 2] * 4)
        return (functional.conv2d(padded, layer.conv.weight) / math.sqrt(1 + 0.001)).relu()

    windows = functional.pad(x, [1] * 4, value=-math.inf).unfold(2, 3, 1).unfold(3, 3, 1)
    expected = [
        apply(block.branch1, x),
        apply(block.branch2[1], apply(block.branch2[0], x)),
        apply(block.branch3[1], apply(block.branch3[0], x)),
        apply(block.branch4[1], windows.amax((-2, -1))),
    ]
    assert [branch.shape[1] for branch in expected] == [2, 4, 7, 1]
    torch.testing.assert_close(block(x), torch.cat(expected, 1))


def test_auxiliary_heads_take_part_in_training_alone() -> None:
    net = models.googlenet(4, small=True, width=0.125, dropout=0.0, dropout_aux=0.0)
    x = torch.randn(3, 3, 8, 8)
    logits, first, second = net(x)
    assert logits.shape == first.shape == second.shape == (3, 4)
    assert net.eval()(x).shape == (3, 4)
    assert models.googlenet(4, small=True, width=0.125, aux_logits=False)(x).shape == (3, 4)
    for output, head, last in ((first, net.aux1, "inception4a"), (second, net.aux2, "inception4d")):
        net.zero_grad()
        output.sum().backward(retain_graph=True)
        reached = {name.split(".")[0] for name, value in net.named_parameters() if value.grad is not None}
        assert last in reached
        assert max(name for name in reached if name.startswith("inception")) == last
        assert all(parameter.grad is not None for parameter in head.parameters())
        assert net.fc.weight.grad is None


def test_auxiliary_heads_read_their_blocks() -> None:
    net = models.googlenet(4, small=True, width=0.125, dropout_aux=0.0)
    seen = {}
    for name in ("inception4a", "inception4d"):
        net.get_submodule(name).register_forward_hook(
            lambda module, args, output, name=name: seen.update({name: output})
        )
    _, first, second = net(torch.randn(5, 3, 8, 8))
    for output, head, name in ((first, net.aux1, "inception4a"), (second, net.aux2, "inception4d")):
        pooled = functional.adaptive_avg_pool2d(seen[name], (4, 4))
        convolved = functional.conv2d(pooled, head.conv.conv.weight)
        normed = functional.batch_norm(convolved, None, None, training=True, eps=0.001).relu()
        units = functional.linear(normed.flatten(1), head.fc1.weight, head.fc1.bias).relu()
        torch.testing.assert_close(functional.linear(units, head.fc2.weight, head.fc2.bias), output)


def test_recoloured_inputs() -> None:
    plain = models.googlenet(4, small=True, width=0.125).eval()
    recoloured = models.googlenet(4, small=True, width=0.125, transform_input=True).eval()
    recoloured.load_state_dict(plain.state_dict())
    pixels = torch.rand(2, 3, 8, 8)
    mean, deviation = torch.tensor([0.485, 0.456, 0.406]), torch.tensor([0.229, 0.224, 0.225])
    standardised = (pixels - mean[:, None, None]) / deviation[:, None, None]
    centred = (pixels - 0.5) / 0.5
    torch.testing.assert_close(recoloured.stages(standardised), plain.stages(centred), rtol=1e-4, atol=1e-5)


# ResNet ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("block", [BasicBlock(4, 4), Bottleneck(4, 6, 4, groups=2)])
def test_a_block_adds_to_what_it_is_given(block: nn.Module) -> None:
    block.eval()
    x = torch.randn(2, 4, 5, 5)
    assert block.residual(x).abs().max() > 0
    torch.testing.assert_close(block(x), (x + block.residual(x)).relu())


@pytest.mark.parametrize("name", ["resnet18", "resnet50"])
def test_blocks_may_begin_with_adding_nothing(name: str) -> None:
    net = models.BUILDERS[name](3, small=True, width=0.125, zero_init_residual=True)
    x = torch.randn(2, net.layer1[-1].bn1.num_features if name == "resnet18" else 32, 5, 5)
    assert torch.equal(net.layer1[-1](x), x.relu())
    for key, value in net.named_parameters():
        if "bn" in key or "downsample.1" in key:
            last = "bn3" if name == "resnet50" else "bn2"
            expected = 0.0 if key.endswith("bias") or last in key else 1.0
            assert (value == expected).all(), key


def test_a_skip_without_weights() -> None:
    x = torch.arange(1.0, 33).reshape(1, 2, 4, 4)
    out = PadChannels(3, 2)(x)
    assert out.shape == (1, 5, 2, 2)
    assert out[0, 0].tolist() == [[1, 3], [9, 11]]
    assert out[0, 1].tolist() == [[17, 19], [25, 27]]
    assert not out[0, 2:].any()


def test_the_stages_of_a_resnet_in_its_own_words() -> None:
    net, x = models.resnet18(3, width=0.125).eval(), torch.randn(1, 3, 40, 40)
    stem = net.relu(net.bn1(net.conv1(x)))
    first = net.layer1(net.maxpool(stem))
    third = net.layer3(net.layer2(first))
    last = net.layer4(third)
    maps = net.stages(x)
    for stage, expected in zip((maps[0], maps[1], maps[3], maps[4]), (stem, first, third, last), strict=True):
        assert torch.equal(stage, expected)
    assert torch.allclose(net(x), net.fc(last.mean((2, 3))), atol=1e-6)


# DenseNet -------------------------------------------------------------------------------------


def test_a_dense_layer_reads_all_before_it() -> None:
    net, x = models.densenet121(3, width=0.25, block_config=(4,), small=True).eval(), torch.randn(2, 16, 5, 5)
    block = net.features.denseblock1
    assert isinstance(block, DenseBlock)
    found = [x]
    for layer in block:
        inner = layer.conv1(functional.relu(layer.norm1(torch.cat(found, 1))))
        found.append(layer.conv2(functional.relu(layer.norm2(inner))))
    assert [map.shape[1] for map in found] == [16, 8, 8, 8, 8]
    torch.testing.assert_close(block(x), torch.cat(found, 1))
    images = torch.randn(2, 3, 9, 9)
    features = net.features.norm5(block(net.features.relu0(net.features.norm0(net.features.conv0(images)))))
    torch.testing.assert_close(net.stages(images)[-1], features.relu())
    torch.testing.assert_close(net(images), net.classifier(features.relu().mean((2, 3))))


# First weights --------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["vgg11_bn", "googlenet", "resnet18", "densenet121"])
def test_first_weights(name: str) -> None:
    """Spread of convolutions and dense layers as torchvision draws them; batch norms are the identity."""
    net = models.BUILDERS[name](10, width=0.25)
    for key, module in net.named_modules():
        if isinstance(module, nn.BatchNorm2d):
            assert (module.weight == 1).all(), key
            assert (module.bias == 0).all(), key
        if isinstance(module, nn.Conv2d) and module.weight.numel() > 4000:
            fan_in, fan_out = (module.weight.shape[dim] * module.kernel_size[0] ** 2 for dim in (1, 0))
            fan = fan_in if name == "densenet121" else fan_out
            expected = 0.01 if name == "googlenet" else math.sqrt(2 / fan)
            assert module.weight.std().item() == pytest.approx(expected, rel=0.1), key
        if isinstance(module, nn.Linear) and module.weight.numel() > 1000:
            drawn = name in ("vgg11_bn", "googlenet")
            expected = 0.01 if drawn else 1 / math.sqrt(3 * module.in_features)
            assert module.weight.std().item() == pytest.approx(expected, rel=0.1), key
        if isinstance(module, nn.Linear | nn.Conv2d) and module.bias is not None:
            assert module.bias.any() == (name in ("googlenet", "resnet18")), key
