"""Families of models, one module each: `read` turns the fields of a config.json into a config.

`decoder_config.FAMILY_MODULES` has a row for each of decoders, which makes a `DecoderConfig`;
`encoder_config.FAMILIES` one for each of encoders, which makes an `EncoderConfig`.
"""
