"""Supervised fine-tuning with transformers' Trainer and without vocabulary logits: one line more."""

from __future__ import annotations

import tempfile

from tiny import tiny_model, tiny_tokenizer
from transformers import DataCollatorForLanguageModeling, Trainer, TrainingArguments

from rise_rl.integrations.transformers import apply_rise_head


def main() -> None:
    model, tokenizer = tiny_model(), tiny_tokenizer()
    apply_rise_head(model)
    texts = ["a b c d e f g", "h i j k", "l m n o p q r s t", "u v w x y z"] * 8
    with tempfile.TemporaryDirectory() as output:
        trainer = Trainer(
            model=model,
            args=TrainingArguments(
                output_dir=output,
                num_train_epochs=3,
                per_device_train_batch_size=4,
                gradient_accumulation_steps=2,
                learning_rate=5e-3,
                logging_steps=4,
                report_to=[],
                save_strategy="no",
            ),
            train_dataset=[tokenizer(text) for text in texts],
            data_collator=DataCollatorForLanguageModeling(tokenizer, mlm=False),  # labels; -100 on padding
        )
        trainer.train()
    print("losses:", [round(row["loss"], 3) for row in trainer.state.log_history if "loss" in row])
    prompt = tokenizer("a b c", return_tensors="pt", return_token_type_ids=False)
    print("answer:", tokenizer.decode(model.generate(**prompt, max_new_tokens=4, do_sample=False)[0]))


if __name__ == "__main__":
    main()
