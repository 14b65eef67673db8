"""BERT for sequence classification in plain PyTorch, with Hugging Face's state-dict names.

The Rust example's model is the same network. Written out here so that the comparison needs torch
and accelerate only, and so that every operation of both sides can be read side by side.
"""

import math
from dataclasses import asdict, dataclass

import torch
from torch import nn
from torch.nn import functional as F


@dataclass(frozen=True)
class BertConfig:
    vocab_size: int = 2000
    hidden_size: int = 128
    num_hidden_layers: int = 2
    num_attention_heads: int = 2
    intermediate_size: int = 512
    max_position_embeddings: int = 64
    type_vocab_size: int = 2
    layer_norm_eps: float = 1e-12
    hidden_dropout_prob: float = 0.0
    attention_probs_dropout_prob: float = 0.0
    num_labels: int = 2

    def as_json(self) -> dict:
        """The keys of a Hugging Face `config.json`."""
        values = asdict(self)
        num_labels = values.pop("num_labels")
        return {
            "model_type": "bert",
            "hidden_act": "gelu",
            "initializer_range": 0.02,
            "pad_token_id": 0,
            **values,
            "id2label": {str(index): f"LABEL_{index}" for index in range(num_labels)},
            "label2id": {f"LABEL_{index}": index for index in range(num_labels)},
        }


class Embeddings(nn.Module):
    def __init__(self, config: BertConfig):
        super().__init__()
        self.word_embeddings = nn.Embedding(config.vocab_size, config.hidden_size, padding_idx=0)
        self.position_embeddings = nn.Embedding(config.max_position_embeddings, config.hidden_size)
        self.token_type_embeddings = nn.Embedding(config.type_vocab_size, config.hidden_size)
        self.LayerNorm = nn.LayerNorm(config.hidden_size, eps=config.layer_norm_eps)
        self.dropout = nn.Dropout(config.hidden_dropout_prob)

    def forward(self, input_ids):
        positions = torch.arange(input_ids.shape[1], device=input_ids.device).unsqueeze(0)
        types = torch.zeros_like(input_ids)
        summed = self.word_embeddings(input_ids) + self.token_type_embeddings(types)
        summed = summed + self.position_embeddings(positions)
        return self.dropout(self.LayerNorm(summed))


class SelfAttention(nn.Module):
    def __init__(self, config: BertConfig):
        super().__init__()
        self.num_heads = config.num_attention_heads
        self.dropout_prob = config.attention_probs_dropout_prob
        self.query = nn.Linear(config.hidden_size, config.hidden_size)
        self.key = nn.Linear(config.hidden_size, config.hidden_size)
        self.value = nn.Linear(config.hidden_size, config.hidden_size)

    def forward(self, hidden, mask):
        batch, length, width = hidden.shape

        def heads(tensor):
            return tensor.view(batch, length, self.num_heads, width // self.num_heads).transpose(1, 2)

        mixed = F.scaled_dot_product_attention(
            heads(self.query(hidden)),
            heads(self.key(hidden)),
            heads(self.value(hidden)),
            attn_mask=mask,
            dropout_p=self.dropout_prob if self.training else 0.0,
        )
        return mixed.transpose(1, 2).reshape(batch, length, width)


class ResidualOutput(nn.Module):
    """Linear, dropout, residual, layer norm: BERT has it after attention and after the feed-forward layer."""

    def __init__(self, config: BertConfig, in_features: int):
        super().__init__()
        self.dense = nn.Linear(in_features, config.hidden_size)
        self.LayerNorm = nn.LayerNorm(config.hidden_size, eps=config.layer_norm_eps)
        self.dropout = nn.Dropout(config.hidden_dropout_prob)

    def forward(self, hidden, residual):
        return self.LayerNorm(self.dropout(self.dense(hidden)) + residual)


class Layer(nn.Module):
    def __init__(self, config: BertConfig):
        super().__init__()
        self.attention = nn.ModuleDict(
            {"self": SelfAttention(config), "output": ResidualOutput(config, config.hidden_size)}
        )
        self.intermediate = nn.ModuleDict({"dense": nn.Linear(config.hidden_size, config.intermediate_size)})
        self.output = ResidualOutput(config, config.intermediate_size)

    def forward(self, hidden, mask):
        attended = self.attention["output"](self.attention["self"](hidden, mask), hidden)
        return self.output(F.gelu(self.intermediate["dense"](attended)), attended)


class BertModel(nn.Module):
    def __init__(self, config: BertConfig):
        super().__init__()
        self.embeddings = Embeddings(config)
        layers = nn.ModuleList(Layer(config) for _ in range(config.num_hidden_layers))
        self.encoder = nn.ModuleDict({"layer": layers})
        self.pooler = nn.ModuleDict({"dense": nn.Linear(config.hidden_size, config.hidden_size)})

    def forward(self, input_ids, attention_mask):
        # True where a position may be looked at; broadcast over heads and queries.
        mask = attention_mask[:, None, None, :].bool()
        hidden = self.embeddings(input_ids)
        for layer in self.encoder["layer"]:
            hidden = layer(hidden, mask)
        return torch.tanh(self.pooler["dense"](hidden[:, 0]))


class BertForSequenceClassification(nn.Module):
    def __init__(self, config: BertConfig):
        super().__init__()
        self.bert = BertModel(config)
        self.dropout = nn.Dropout(config.hidden_dropout_prob)
        self.classifier = nn.Linear(config.hidden_size, config.num_labels)

    def forward(self, input_ids, attention_mask, labels):
        logits = self.classifier(self.dropout(self.bert(input_ids, attention_mask)))
        return F.cross_entropy(logits, labels), logits


def initialise(model: nn.Module, seed: int) -> None:
    """Fills every parameter from one seeded stream.

    Biases are not zero here, unlike BERT's own initialisation: a bias that is left out, or added
    twice, must show in the first loss.
    """
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            is_norm_scale = name.endswith("LayerNorm.weight")
            fan_in = parameter.shape[-1]
            scale = 0.02 if parameter.dim() < 2 else 1.0 / math.sqrt(fan_in)
            parameter.copy_(1.0 + 0.1 * noise if is_norm_scale else scale * noise)
