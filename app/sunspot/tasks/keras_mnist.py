"""Classifies digits or other images with a small convolutional network in Keras."""

import keras
from keras import layers

from sunspot.data.source import Source
from sunspot.settings import Settings

__all__ = ["build_keras"]


def build_keras(settings: Settings, source: Source) -> keras.Model:
    channels, height, width = source.shape
    model = keras.Sequential(
        [
            keras.Input((height, width, channels)),
            layers.Rescaling(1 / 255),
            layers.Conv2D(16, 3, padding="same", activation="relu"),
            layers.MaxPooling2D(padding="same"),
            layers.Conv2D(32, 3, padding="same", activation="relu"),
            layers.MaxPooling2D(padding="same"),
            layers.Flatten(),
            layers.Dense(source.classes),
        ]
    )
    model.compile(keras.optimizers.Adam(), keras.losses.SparseCategoricalCrossentropy(from_logits=True))
    return model
