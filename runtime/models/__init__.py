"""Model code, written for reading: decoders of the Llama family, and BERT-type encoders."""
