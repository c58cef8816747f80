"""Model code, written for reading: decoders of many families, and BERT-type encoders."""
