"""Fine-tunes a Llama with TRL's SFTTrainer, its activations kept by stormd: one line more.

The weights are random and the words a dozen, so that nothing is downloaded.
"""

import tempfile

import torch
from datasets import Dataset
from storm_client.integrations.trl import get_act_offloading_ctx_manager
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Whitespace
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast
from trl import SFTConfig, SFTTrainer

ANIMALS, COLOURS = ["cat", "dog", "bird"], ["red", "green"]
WORDS = ["<pad>", "<eos>", "the", "sees", "a", "house", "and", *ANIMALS, *COLOURS]


def main():
    torch.manual_seed(0)
    words = Tokenizer(WordLevel({word: i for i, word in enumerate(WORDS)}, unk_token="<eos>"))
    words.pre_tokenizer = Whitespace()
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=words, pad_token="<pad>", eos_token="<eos>"
    )
    sentences = [f"the {who} sees a {what} house and" for who in ANIMALS for what in COLOURS]
    rows = Dataset.from_dict({"text": [" ".join([sentence] * 30) for sentence in sentences * 4]})
    model = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=len(WORDS),
            hidden_size=256,
            intermediate_size=704,
            num_hidden_layers=4,
            num_attention_heads=4,
            pad_token_id=0,
            eos_token_id=1,
        )
    )
    with tempfile.TemporaryDirectory() as folder:
        config = SFTConfig(
            output_dir=folder,
            max_steps=3,
            per_device_train_batch_size=6,
            logging_steps=1,
            bf16=False,
            activation_checkpointing=False,  # TRL's default recomputes what offload keeps
            report_to=[],
            disable_tqdm=True,
            save_strategy="no",
        )
        trainer = SFTTrainer(
            model=model, args=config, train_dataset=rows, processing_class=tokenizer
        )
        offload = get_act_offloading_ctx_manager(trainer.model)
        trainer.maybe_activation_offload_context = offload
        trainer.train()
    print(offload.stats())


if __name__ == "__main__":
    main()
