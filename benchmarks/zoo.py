"""One table of real models in small configurations with random weights, for the sweep over whole architectures."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

CLASSES, VOCABULARY = 10, 100
Options = dict[str, Any]


@dataclass(frozen=True)
class Entry:
    """A model by name, how it trains and how it is read; the caller seeds before `build` and sets the mode."""

    name: str
    family: str
    build: Callable[[], nn.Module]
    batch: Callable[[], Any]
    loss: Callable[[nn.Module, Any], Tensor]
    output: Callable[[nn.Module, Any], list[Tensor]]
    default: bool = False


def _inputs(tokens: str = "", **values: Any) -> Callable[[], Any]:
    """Keyword arguments of a model: a tuple is the shape of normal values, a list that of random classes.

    Tokens are four rows of ids, the last half padding, labelled per `token`, per `sequence`, with a `target` or not.
    """

    def batch() -> dict[str, Any]:
        g, drawn = torch.Generator().manual_seed(0), {}
        if tokens:
            ids, mask = torch.randint(3, VOCABULARY, (4, 16), generator=g), torch.ones(4, 16, dtype=torch.long)
            mask[-1, 8:] = 0
            token, sequence, target = ids.masked_fill(mask == 0, -100), ids[:, 0] % CLASSES, ids[:2].view(4, 8)
            labels = {"token": token, "sequence": sequence, "target": target}
            drawn = {"input_ids": ids, "attention_mask": mask}
            drawn |= {"labels": labels[tokens]} if tokens in labels else {}
        normal, classes = partial(torch.randn, generator=g), partial(torch.randint, CLASSES, generator=g)
        draw: dict[type, Any] = {tuple: normal, list: classes, bool: bool}
        return drawn | {key: draw[type(value)](value) for key, value in values.items()}

    return batch


def _labelled(*shape: int, target: tuple[int, ...] = ()) -> Callable[[], Any]:
    """Normal inputs of a shape, batch first, with one class for each sample or for each position of `target`."""
    draw = _inputs(x=shape, y=[shape[0], *target])
    return lambda: tuple(draw().values())


def _scenes() -> tuple[list[Tensor], list[dict[str, Tensor]]]:
    """Two images in 0 to 1 with boxes, their labels, masks and seventeen keypoints: three of each, and two of them."""
    boxes = torch.tensor([[8.0, 8.0, 40.0, 48.0], [30.0, 20.0, 90.0, 100.0], [64.0, 50.0, 120.0, 90.0]])
    x, y = ((torch.arange(128) >= boxes[:, [i]]) & (torch.arange(128) < boxes[:, [i + 2]]) for i in (0, 1))
    points = torch.lerp(boxes[:, None, :2], boxes[:, None, 2:], torch.linspace(0.1, 0.9, 17)[:, None])
    target = {"boxes": boxes, "labels": torch.tensor([1, 4, 9]), "keypoints": F.pad(points, (0, 1), value=1.0)}
    target["masks"] = (y[:, :, None] & x[:, None]).byte()
    images = torch.rand(2, 3, 128, 128, generator=torch.Generator().manual_seed(0))
    return list(images), [target, {key: value[1:] for key, value in target.items()}]


def _tensors(value: Any) -> list[Tensor]:
    """Every floating-point tensor in nested outputs but a loss; what is no container, like a cache, is passed over."""
    if isinstance(value, Tensor):
        return [value] if value.is_floating_point() and value.dim() else []
    value = list(value.values()) if isinstance(value, Mapping) else value
    return [t for item in value for t in _tensors(item)] if isinstance(value, (list, tuple)) else []


def _read(model: nn.Module, batch: Any) -> list[Tensor]:
    return _tensors(model(**batch) if isinstance(batch, dict) else model(batch[0]))


def _raw(model: Any, batch: Any) -> list[Tensor]:
    """What a detector's heads put out before any selection; those of its second stage for proposals that are fixed."""
    images, _ = model.transform(batch[0])
    features = model.backbone(images.tensors)
    if not hasattr(model, "rpn"):
        return _tensors(model.head(list(features.values())))
    out, heads = _tensors(model.rpn.head(list(features.values()))), model.roi_heads
    boxes = torch.tensor([[0.1, 0.1, 0.5, 0.6], [0.3, 0.2, 0.9, 0.8], [0.05, 0.5, 0.4, 0.95]])
    proposals = [boxes.to(images.tensors) * min(size) for size in images.image_sizes]
    for kind in ("box", "mask", "keypoint"):
        if (pool := getattr(heads, f"{kind}_roi_pool", None)) is not None:
            pooled = getattr(heads, f"{kind}_head")(pool(features, proposals, images.image_sizes))
            out += _tensors(getattr(heads, f"{kind}_predictor")(pooled))
    return out


def _loss(model: nn.Module, batch: Any) -> Tensor:
    """The cross-entropy of every head, auxiliary ones too; from keywords a model's own loss or else its mean output."""
    if not isinstance(batch, dict):
        return torch.stack([F.cross_entropy(head, batch[1]) for head in _read(model, batch)]).sum()
    out = model(**batch)
    own = out.get("loss") if isinstance(out, Mapping) else None
    return own if own is not None else torch.stack([t.abs().mean() for t in _tensors(out)]).sum()


# --- builders ---


def awake_(model: nn.Module) -> None:
    """Parameters that start at zero, or next to it, as noise: every branch and every bias then shows in the output."""
    with torch.no_grad():
        for p in model.parameters():
            if p.numel() and p.abs().max() < 1e-3:
                p.normal_(std=0.1)


def _entry(family: str, name: str, build: Callable[[], nn.Module], batch: Any, **rest: Any) -> Entry:
    rest = {"loss": _loss, "output": _read, "default": name in _DEFAULT, **rest}
    return Entry(name, family, build, batch, **rest)


def _timm(family: str, name: str, size: int = 64, n: int = 4, **options: Any) -> Entry:
    def build() -> Any:
        return importlib.import_module("timm").create_model(name, num_classes=CLASSES, **options)

    return _entry(family, f"timm/{name}", build, _labelled(n, 3, size, size))


def _torchvision(family: str, name: str, task: str = "", n: int = 4, shape: Any = (64, 64), **options: Any) -> Entry:
    """A classifier, or the detector or segmenter that `task` names."""
    batch: Any = _labelled(n, 3, *shape, target=shape if task == "segmentation" else ())
    rest: Options = {}
    if task == "detection":
        batch, rest = _scenes, {"output": _raw, "loss": lambda model, batch: sum(model(*batch).values())}

    def build() -> Any:
        models = importlib.import_module("torchvision.models")
        make = globals().get(f"_{name}") or getattr(models, name, None) or partial(models.get_model, name)
        return make(num_classes=CLASSES, **({"weights_backbone": None} if task else {}), **options)

    return _entry(family, f"torchvision/{name}", build, batch, **rest)


def _transformers(family: str, name: str, batch: Any, **config: Any) -> Entry:
    def build() -> Any:
        cls = getattr(importlib.import_module("transformers"), name)
        return cls(cls.config_class(**config))

    return _entry(family, f"transformers/{name}", build, batch)


def _each(make: Callable[[str, str], Entry], table: dict[str, str]) -> list[Entry]:
    return [make(family, name) for family, names in table.items() for name in names.split()]


def _fasterrcnn_resnet18_frozen(weights_backbone: None, **options: Any) -> Any:
    """The form that fine-tuning has: FrozenBatchNorm2d in the backbone, and its first two stages without gradients."""
    detection = importlib.import_module("torchvision.models.detection")
    backbone = detection.backbone_utils.resnet_fpn_backbone(backbone_name="resnet18", weights=None, trainable_layers=3)
    return detection.FasterRCNN(backbone, **options)


def _ssd300_vgg16(weights_backbone: None, **options: Any) -> Any:
    """The builder's detector, for 272 pixels, on a VGG that is thin where the builder's is slow."""
    models = importlib.import_module("torchvision.models")
    rows = [16, 16, "M", 16, 16, "M", 32, 32, 32, "M", 32, 32, 512, "M", 32, 32, 512, "M"]
    backbone = models.detection.ssd.SSDFeatureExtractorVGG(models.vgg.make_layers(rows), highres=False)
    anchors = models.detection.anchor_utils.DefaultBoxGenerator([[2], [2, 3], [2, 3], [2, 3], [2], [2]])
    return models.detection.ssd.SSD(backbone, anchors, size=(272, 272), **options)


def _mvit_v2_s(**options: Any) -> Any:
    """The builder's options with three blocks instead of sixteen, and narrow ones."""
    mvit = importlib.import_module("torchvision.models.video.mvit")
    rows = [(1, 16, 16, 1, 4), (2, 16, 32, 2, 2), (4, 32, 64, 2, 1)]
    blocks = [mvit.MSBlockConfig(h, i, o, [3] * 3, [3] * 3, [1, q, q], [1, kv, kv]) for h, i, o, q, kv in rows]
    return mvit.MViT((32, 32), 8, blocks, True, False, rel_pos_embed=True, proj_after_attn=True, **options)


def _s3d(**options: Any) -> Any:
    """The builder's, but for its last pooling, which would ask for 16 frames of 224 pixels."""
    model = importlib.import_module("torchvision.models.video").s3d(**options)
    model.avgpool = nn.AdaptiveAvgPool3d(1)
    return model


class _Sequences(nn.Module):
    """nn.TransformerEncoder as a classifier of padded sequences, or nn.Transformer as a translator of them."""

    def __init__(self, translate: bool) -> None:
        super().__init__()
        self.embed, self.translate = nn.Embedding(VOCABULARY, 32), translate
        layer = nn.TransformerEncoderLayer(32, 4, 64, batch_first=True)
        both = nn.Transformer(32, 4, 2, 2, 64, batch_first=True) if translate else nn.TransformerEncoder(layer, 2)
        self.transformer, self.head = both, nn.Linear(32, VOCABULARY if translate else CLASSES)

    def forward(self, input_ids: Tensor, attention_mask: Tensor, labels: Tensor) -> dict[str, Tensor]:
        x, masks = self.embed(input_ids), {"src_key_padding_mask": attention_mask == 0}
        if self.translate:
            causal = nn.Transformer.generate_square_subsequent_mask(labels.shape[1], device=x.device, dtype=torch.bool)
            masks |= {"memory_key_padding_mask": masks["src_key_padding_mask"], "tgt_mask": causal}
            logits = self.head(self.transformer(x, self.embed(labels.roll(1, 1)), **masks)).transpose(1, 2)
        else:
            logits = self.head(self.transformer(x, **masks)[:, :8].mean(1))
        return {"loss": F.cross_entropy(logits, labels), "logits": logits}


class _UNet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        pairs = ((3, 8), (8, 16), (16, 32), (32, 16), (16, 8))
        unit = partial(_unit, nn.Conv2d, nn.BatchNorm2d, geometry=(3, 1, 1))
        self.blocks = nn.ModuleList(nn.Sequential(unit(i, o), unit(o, o)) for i, o in pairs)
        self.up2, self.up1 = nn.ConvTranspose2d(32, 16, 2, stride=2), nn.ConvTranspose2d(16, 8, 2, stride=2)
        self.head = nn.Conv2d(8, CLASSES, 1)

    def forward(self, x: Tensor) -> Any:
        one = self.blocks[0](x)
        two = self.blocks[1](F.max_pool2d(one, 2))
        two = torch.cat([two, self.up2(self.blocks[2](F.max_pool2d(two, 2)))], 1)
        return self.head(self.blocks[4](torch.cat([one, self.up1(self.blocks[3](two))], 1)))


def _unit(layer: Any, norm: Any, i: int, o: int, geometry: Any) -> nn.Module:
    return nn.Sequential(layer(i, o, *geometry, bias=False), norm(o), nn.ReLU())


def _wave() -> nn.Module:
    down = [_unit(nn.Conv1d, nn.BatchNorm1d, i, o, (5, 2, 2)) for i, o in ((2, 16), (16, 32))]
    up = [_unit(nn.ConvTranspose1d, partial(nn.GroupNorm, 4), i, o, (4, 2, 1)) for i, o in ((32, 16), (16, 16))]
    return nn.Sequential(*down, *up, nn.Conv1d(16, CLASSES, 1))


def _dcgan() -> nn.Module:
    up = [_unit(nn.ConvTranspose2d, nn.BatchNorm2d, *row) for row in ((64, 32, (4, 1, 0)), (32, 16, (4, 2, 1)))]
    return nn.Sequential(*up, nn.ConvTranspose2d(16, 3, 4, 2, 1, bias=False), nn.Tanh())


# --- the table ---

# fmt: off
_DEFAULT = {
    "torchvision/resnet18", "torchvision/VisionTransformer", "torchvision/fasterrcnn_mobilenet_v3_large_320_fpn",
    "torchvision/lraspp_mobilenet_v3_large", "timm/resnetv2_50x1_bit", "timm/efficientnet_b0", "timm/convnext_atto",
    "timm/vit_tiny_patch16_224", "timm/test_nfnet", "transformers/BertForMaskedLM", "transformers/GPT2LMHeadModel",
    "transformers/LlamaForCausalLM", "transformers/T5ForConditionalGeneration", "torch/Transformer", "torch/wave",
    "transformers/WhisperForConditionalGeneration", "torch/TransformerEncoder", "torch/unet", "torch/dcgan",
}
_SMALL: Options = {"task": "detection", "min_size": 128, "max_size": 128}
_FEW: Options = {**_SMALL, "rpn_pre_nms_top_n_train": 50, "rpn_post_nms_top_n_train": 20, "box_batch_size_per_image": 8}
_TWO: Options = {"img_size": 64, "embed_dim": 64, "depth": 2, "num_heads": 4}
_WIDTH: Options = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 64}
_WORDS: Options = {"vocab_size": VOCABULARY, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
_TEXT: Options = {
    **_WORDS, **_WIDTH, "max_position_embeddings": 64, "embedding_size": 16, "cls_token_id": 1, "sep_token_id": 2,
    "initializer_range": 0.1, "init_std": 0.1, "ffn_dim": 64, "word_embed_proj_dim": 16, "hidden_dim": 64,
    "relative_attention": True, "pos_att_type": ["c2p", "p2c"], "conv_kernel_size": 3,
}
_GROUPED: Options = {**_TEXT, "num_key_value_heads": 2, "head_dim": 8, "num_local_experts": 4, "sliding_window": 8}
_STACK = {"layers": 2, "attention_heads": 4, "ffn_dim": 64}
_STACKS: Options = {"d_model": 32, **{f"{s}_{k}": v for s in ("encoder", "decoder") for k, v in _STACK.items()}}
_SEQ2SEQ: Options = {**_WORDS, **_STACKS, "decoder_start_token_id": 1, "init_std": 0.1}
_IMAGE: Options = {**_WIDTH, "image_size": 32, "patch_size": 8, "initializer_range": 0.1, "num_labels": CLASSES}
_RESNET: Options = {"hidden_sizes": [16, 32, 48, 64], "depths": [1, 1, 1, 1], "num_labels": CLASSES}
_SWIN: Options = {"image_size": 32, "embed_dim": 16, "depths": [1, 2], "num_heads": [2, 4], "window_size": 4}
_PIXELS = _inputs(pixel_values=(4, 3, 32, 32), labels=[4])
_MAPS = _inputs(pixel_values=(2, 3, 64, 64), labels=[2, 64, 64])
_PAIRS = _inputs("unlabelled", pixel_values=(4, 3, 32, 32), return_loss=True)

ZOO: list[Entry] = [
    *_each(_torchvision, {
        "AlexNet": "alexnet", "ConvNeXt": "convnext_tiny", "DenseNet": "densenet121", "EfficientNet": "efficientnet_b0",
        "EfficientNetV2": "efficientnet_v2_s", "MNASNet": "mnasnet0_5", "MobileNetV2": "mobilenet_v2",
        "MobileNetV3": "mobilenet_v3_small", "RegNet": "regnet_x_400mf regnet_y_400mf", "ResNet": "resnet18 resnet50",
        "ResNeXt": "resnext50_32x4d", "Wide ResNet": "wide_resnet50_2", "ShuffleNetV2": "shufflenet_v2_x0_5",
        "SqueezeNet": "squeezenet1_1", "Swin": "swin_t", "SwinV2": "swin_v2_t",
    }),
    *_each(partial(_torchvision, init_weights=False), {"GoogLeNet": "googlenet", "VGG": "vgg11 vgg11_bn"}),
    _torchvision("Inception", "inception_v3", shape=(299, 299), n=2, init_weights=False),
    _torchvision("MaxViT", "MaxVit", input_size=(64, 64), stem_channels=16, partition_size=2, block_channels=[16, 32],
                 block_layers=[1, 2], head_dim=8, stochastic_depth_prob=0.1),
    _torchvision("ViT", "VisionTransformer", image_size=64, patch_size=16, num_layers=2, num_heads=4, hidden_dim=32,
                 mlp_dim=64),
    *_each(partial(_torchvision, **_FEW), {
        "Faster R-CNN": "fasterrcnn_resnet50_fpn fasterrcnn_resnet50_fpn_v2 fasterrcnn_mobilenet_v3_large_320_fpn"
                        " fasterrcnn_resnet18_frozen",
        "Mask R-CNN": "maskrcnn_resnet50_fpn", "Keypoint R-CNN": "keypointrcnn_resnet50_fpn",
    }),
    *_each(partial(_torchvision, **_SMALL), {
        "RetinaNet": "retinanet_resnet50_fpn retinanet_resnet50_fpn_v2", "FCOS": "fcos_resnet50_fpn",
    }),
    *_each(partial(_torchvision, task="detection"), {"SSD": "ssd300_vgg16 ssdlite320_mobilenet_v3_large"}),
    _torchvision("DeepLabV3", "deeplabv3_resnet50", "segmentation", n=2, aux_loss=True),
    _torchvision("FCN", "fcn_resnet50", "segmentation", n=2, aux_loss=True),
    _torchvision("LR-ASPP", "lraspp_mobilenet_v3_large", "segmentation", n=2),
    *_each(partial(_torchvision, n=2, shape=(8, 32, 32)), {
        "R3D": "r3d_18", "MC3": "mc3_18", "R(2+1)D": "r2plus1d_18", "Video Swin": "swin3d_t", "MViTv2": "mvit_v2_s",
    }),
    _torchvision("S3D", "s3d", n=2, shape=(8, 64, 64)),
    *_each(_timm, {
        "EfficientNet": "efficientnet_b0 tf_efficientnet_b0 efficientnet_cc_b0_4e test_efficientnet_gn"
                        " test_efficientnet_ln test_efficientnet_evos",
        "ResNet": "resnet10t resnetblur18", "ResNeSt": "resnest14d", "SE-ResNet": "seresnet18 legacy_seresnet18",
        "BiT": "resnetv2_50x1_bit", "ECA-ResNet": "ecaresnet26t", "SKNet": "skresnet18", "TResNet": "tresnet_m",
        "DLA": "dla46_c", "DPN": "dpn48b", "VoVNet": "ese_vovnet19b_slim_dw ese_vovnet39b_evos", "DarkNet": "darknet17",
        "HRNet": "hrnet_w18_small", "CSPNet": "cspresnet50 cspdarknet53 cs3darknet_focus_s", "MNASNet": "mnasnet_small",
        "RegNet": "regnetx_002 regnety_002 regnetz_005", "EfficientNetV2": "tf_efficientnetv2_b0", "MixNet": "mixnet_s",
        "MobileNetV1": "mobilenetv1_100", "MobileNetV2": "mobilenetv2_035", "MobileNetV3": "mobilenetv3_small_050",
        "MobileNetV4": "mobilenetv4_conv_small_035 mobilenetv4_hybrid_medium", "FBNet": "fbnetc_100 fbnetv3_b",
        "GhostNet": "ghostnet_050 ghostnetv2_100 ghostnetv3_050", "HardCoRe-NAS": "hardcorenas_a", "LCNet": "lcnet_035",
        "ReXNet": "rexnet_100", "TinyNet": "tinynet_e", "NFNet": "test_nfnet dm_nfnet_f0 nf_regnet_b0 eca_nfnet_l0",
        "ConvNeXt": "convnext_atto convnext_zepto_rms", "ConvNeXtV2": "convnextv2_atto", "SelecSLS": "selecsls42b",
        "ConvMixer": "convmixer_1024_20_ks9_p14", "Xception": "legacy_xception xception41 xception41p",
        "GCNet": "gcresnet33ts", "RepVGG": "repvgg_a0", "FocalNet": "focalnet_tiny_srf", "PVTv2": "pvt_v2_b0",
        "RepGhost": "repghostnet_050", "MobileOne": "mobileone_s0", "StarNet": "starnet_s050", "RDNet": "rdnet_tiny",
        "InceptionNeXt": "inception_next_atto", "HGNet": "hgnet_tiny hgnetv2_b0", "FasterNet": "fasternet_t0",
        "MambaOut": "mambaout_femto", "LambdaNet": "lambda_resnet26t", "FastViT": "fastvit_t8", "RepViT": "repvit_m0_9",
        "EfficientViT (MIT)": "efficientvit_b0", "EdgeNeXt": "edgenext_xx_small", "CAFormer": "caformer_s18",
        "PoolFormer": "poolformer_s12 poolformerv2_s12", "MobileViT": "mobilevit_xxs", "MobileViTV2": "mobilevitv2_050",
        "SHViT": "shvit_s1", "SwiftFormer": "swiftformer_xs", "TinyViT": "tiny_vit_5m_224", "MViTv2": "mvitv2_tiny",
        "XCiT": "xcit_nano_12_p16_224", "Twins": "twins_pcpvt_small twins_svt_small", "CrossViT": "crossvit_tiny_240",
    }),
    *_each(partial(_timm, img_size=64), {
        "BoTNet": "botnet26t_256", "EfficientFormerV2": "efficientformerv2_s0", "LeViT": "levit_128s levit_conv_128s",
        "EfficientViT (MSRA)": "efficientvit_m0", "MaxViT": "maxvit_rmlp_pico_rw_256 maxvit_tiny_tf_224",
        "CoAtNet": "coatnet_pico_rw_224 coatnext_nano_rw_224", "Visformer": "visformer_tiny",
        "ViTamin": "vitamin_small_224", "ViT hybrid": "vit_tiny_r_s16_p8_224", "MLP-Mixer": "mixer_s32_224",
        "ResMLP": "resmlp_12_224", "gMLP": "gmlp_ti16_224", "PiT": "pit_ti_224", "CoaT": "coat_lite_tiny coat_tiny",
        "ConViT": "convit_tiny", "GCViT": "gcvit_xxtiny", "NesT": "nest_tiny", "VOLO": "volo_d1_224",
    }),
    *_each(partial(_timm, img_size=64, depth=4), {
        "ViT": "vit_tiny_patch16_224 vit_wee_patch16_reg1_gap_256", "DeiT": "deit_tiny_distilled_patch16_224",
        "CaiT": "cait_xxs24_224", "TNT": "tnt_s_patch16_224",
    }),
    *_each(partial(_timm, **_TWO), {
        "ViT": "vit_relpos_small_patch16_224", "DeiT3": "deit3_small_patch16_224", "BEiT": "beit_base_patch16_224",
    }),
    *_each(partial(_timm, layers=(1, 1, 1, 1)), {
        "ResNet": "resnet50d resnetaa50d", "Res2Net": "res2net50_14w_8s", "Sequencer2D": "sequencer2d_s",
        "ResNetV2": "resnetv2_50 resnetv2_50d_gn resnetv2_50d_evos resnetv2_50d_frn",
    }),
    *_each(partial(_timm, img_size=64, embed_dim=48, depths=(2, 2, 2, 2)), {
        "Swin": "swin_tiny_patch4_window7_224", "SwinV2": "swinv2_tiny_window8_256 swinv2_cr_tiny_ns_224",
    }),
    *_each(partial(_timm, size=96), {"Inception": "inception_v3 inception_v4 inception_resnet_v2"}),
    *_each(partial(_timm, size=256, n=2), {"HaloNet": "halonet26t", "BAT": "bat_resnext26ts"}),
    _timm("EfficientFormer", "efficientformer_l1", 224, n=2),
    _timm("DenseNet", "densenet121", block_config=(2, 2, 2, 2)),
    _timm("NASNet", "nasnetalarge", stem_size=16, num_features=384),
    _timm("PNASNet", "pnasnet5large", n=2),
    _timm("NextViT", "nextvit_small", depths=(1, 1, 5, 1)),
    _timm("EVA-02", "eva02_tiny_patch14_224", 56, img_size=56, depth=4),
    _timm("SAM", "samvit_base_patch16_224", global_attn_indexes=(1,), **_TWO),
    _timm("DaViT", "davit_tiny", embed_dims=(24, 48, 96, 192)),
    _timm("Hiera", "hiera_tiny_224", img_size=64, stages=(1, 1, 2, 1)),
    *_each(partial(_transformers, batch=_inputs("token"), **_TEXT), {
        "BERT": "BertForMaskedLM", "ALBERT": "AlbertForMaskedLM", "DistilBERT": "DistilBertForMaskedLM",
        "DeBERTa": "DebertaForMaskedLM", "DeBERTaV2": "DebertaV2ForMaskedLM", "RoBERTa": "RobertaForMaskedLM",
        "ELECTRA": "ElectraForMaskedLM", "ModernBERT": "ModernBertForMaskedLM", "GPT-2": "GPT2LMHeadModel",
        "GPT-NeoX": "GPTNeoXForCausalLM", "BLOOM": "BloomForCausalLM", "OPT": "OPTForCausalLM",
        "Falcon": "FalconForCausalLM", "Phi": "PhiForCausalLM", "Mamba": "MambaForCausalLM",
    }),
    *_each(partial(_transformers, batch=_inputs("token"), **_GROUPED), {
        "Llama": "LlamaForCausalLM", "Mistral": "MistralForCausalLM", "Mixtral": "MixtralForCausalLM",
        "Qwen": "Qwen3ForCausalLM", "Gemma": "GemmaForCausalLM",
    }),
    _transformers("BERT", "BertForSequenceClassification", _inputs("sequence"), **_TEXT, num_labels=CLASSES),
    _transformers("T5", "T5ForConditionalGeneration", _inputs("target"), **_WORDS, d_model=32, d_kv=8, d_ff=64,
                  num_layers=2, num_heads=4, decoder_start_token_id=0),
    _transformers("BART", "BartForConditionalGeneration", _inputs("target"), **_SEQ2SEQ),
    _transformers("Whisper", "WhisperForConditionalGeneration", _inputs(input_features=(2, 8, 32), labels=[2, 6]),
                  **_SEQ2SEQ, num_mel_bins=8, max_source_positions=16, max_target_positions=32),
    _transformers("Wav2Vec2", "Wav2Vec2ForSequenceClassification", _inputs(input_values=(4, 800), labels=[4]), **_TEXT,
                  conv_dim=[16] * 2, conv_kernel=[10, 3], conv_stride=[5, 2], mask_time_prob=0.0, num_labels=CLASSES),
    _transformers("CLIP", "CLIPModel", _PAIRS, text_config=_TEXT, vision_config=_IMAGE, projection_dim=16),
    _transformers("SigLIP", "SiglipModel", _PAIRS, text_config=_TEXT, vision_config=_IMAGE),
    _transformers("ViT", "ViTForImageClassification", _PIXELS, **_IMAGE),
    _transformers("DINOv2", "Dinov2ForImageClassification", _PIXELS, **_IMAGE, use_swiglu_ffn=True),
    _transformers("BEiT", "BeitForImageClassification", _PIXELS, **_IMAGE, use_relative_position_bias=True),
    _transformers("Swin", "SwinForImageClassification", _PIXELS, **_SWIN, num_labels=CLASSES),
    _transformers("SwinV2", "Swinv2ForImageClassification", _PIXELS, **_SWIN, num_labels=CLASSES),
    _transformers("ResNet", "ResNetForImageClassification", _PIXELS, **_RESNET),
    _transformers("ConvNeXt", "ConvNextForImageClassification", _PIXELS, **_RESNET),
    _transformers("ConvNeXtV2", "ConvNextV2ForImageClassification", _PIXELS, **_RESNET),
    _transformers("SegFormer", "SegformerForSemanticSegmentation", _MAPS, **_RESNET, num_attention_heads=[1, 2, 4, 8],
                  decoder_hidden_size=32),
    _transformers("DETR", "DetrForObjectDetection", _inputs(pixel_values=(2, 3, 64, 64)), **_STACKS,
                  num_queries=5, use_timm_backbone=False,
                  backbone_config={"model_type": "resnet", "out_features": ["stage4"], **_RESNET}),
    _entry("Transformer", "torch/TransformerEncoder", lambda: _Sequences(translate=False), _inputs("sequence")),
    _entry("Transformer", "torch/Transformer", lambda: _Sequences(translate=True), _inputs("target")),
    _entry("Auto-encoder", "torch/wave", _wave, _labelled(4, 2, 32, target=(32,))),
    _entry("U-Net", "torch/unet", _UNet, _labelled(4, 3, 32, 32, target=(32, 32))),
    _entry("DCGAN", "torch/dcgan", _dcgan, _inputs(input=(4, 64, 1, 1))),
]
# fmt: on
