"""Predicts where every byte lives before anything is allocated. No torch."""
