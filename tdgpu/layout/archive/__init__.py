"""Archives: zip files whose entries mirror a saved directory."""
