"""Published methods as files of options: `load_recipe("vppo")`, `vgr-trl train --recipe vppo`.

Read any of the YAML files, then `recipe.py`. docs/recipes.md has the table of all.
"""

from vgr_trl.recipes.recipe import About, Recipe, load_recipe, read_recipe, recipe_names

__all__ = ["About", "Recipe", "load_recipe", "read_recipe", "recipe_names"]
